"""Pretrained weights: a compiled model's named tensors from and to safetensors, one at a time."""
