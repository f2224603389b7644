"""Shared parts of passes: facts that they hand on, budgets, arena, Belady's rule, order of updates."""
