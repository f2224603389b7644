"""Pretrained weights: a compiled model's named tensors from and to safetensors, one at a time.

`tensors` names what a model's state dict holds and reads or writes one of them; `files` reads headers of safetensors
files and maps their data; `load` brings the two together; `save` writes shards, and `streamed` lets transformers write
them; `initial` asks a module's own initialisation for values that stand in no file.
"""
