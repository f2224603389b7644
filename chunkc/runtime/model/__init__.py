"""The runtime of one model: its parameters, its phase, clipping, and what backward does."""
