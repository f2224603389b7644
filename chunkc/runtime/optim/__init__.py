"""The optimizer that users hold, its state dict, and the gradient scaler."""
