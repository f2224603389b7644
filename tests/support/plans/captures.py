"""Capturing small modules in tests: the captured iteration itself, with nothing planned and nothing run."""

from typing import Any

from torch import nn

from chunkc.capture.graphs import Captured
from chunkc.compiler.plan_ahead import capture_ahead


def capture_once(model: nn.Module, *inputs: Any) -> Captured:
    return capture_ahead(model, None, inputs, "eager")
