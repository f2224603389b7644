"""The arithmetic of a step on the host: Adam on chunks, its inputs, loss scales, norms."""
