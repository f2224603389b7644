"""Triton kernels over chunks: update, casts and gradient norms on the device.

They are imported lazily, and know nothing of chunkc's other packages.
"""
