"""Frames in front of modules that torch owns, for Dynamo to compile.

Dynamo compiles no frame of torch's own modules, only what others inline of them. It skips a frame that breaks inside a
loop, and goes on with the frames that this one calls; of torch's modules there would be none:

    forward, skipped ─┬─ nn.Sequential.__call__ ── frame, compiled ── nn.Sequential.forward
                      └─ nn.Linear.__call__ ────── frame, compiled ── nn.Linear.forward
"""

from __future__ import annotations

from torch import nn

from chunkc._torch_compat.core import plain_call


def add_frames(model: nn.Module) -> None:
    """Call every module of torch's inside ``model`` through a frame that Dynamo may compile; idempotent."""
    for module in model.modules():
        is_torchs = type(module).forward.__module__.partition(".")[0] == "torch"
        if module is not model and is_torchs and module._compiled_call_impl is None:
            module._compiled_call_impl = plain_call(module)
