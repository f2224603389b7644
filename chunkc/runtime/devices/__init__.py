"""Devices behind one protocol: the emulated one and CUDA, their streams, memory and budgets."""
