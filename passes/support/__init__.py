"""What passes share: the facts that they hand on, budgets, the arena, Belady's rule, the order of updates."""
