"""The ranks of a job: their agreements, their exchanges, and their reports of where they failed."""
