"""The ranks of a job: what they agree on, what they exchange, and what they tell each other when one fails."""
