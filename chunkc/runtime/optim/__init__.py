"""The optimizers that users hold, their state dict, and the gradient scaler."""
