"""Attention as a GPU computes it: the kernel it takes, how that is traced, and its workspace."""
