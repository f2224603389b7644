"""Non-model memory of each compiled segment as it will run, and of the iteration around it."""
