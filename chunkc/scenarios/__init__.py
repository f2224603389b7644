"""Plans without a GPU: models by name, captured without memory, on machines by name."""
