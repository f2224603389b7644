"""Non-model memory of compiled segments: what each takes as it will run, and what the iteration holds around it."""
