"""Triton kernels over chunks: update, casts and gradient norms on the device."""
