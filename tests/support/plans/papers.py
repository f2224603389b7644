"""The models of the papers: GPT-2 and BERT shapes by name, parameters counted by formula, schedules by hand."""

from collections.abc import Sequence

from schedules import op, param, schedule

from chunkc.ir.schedule import ParamInfo, Schedule

SEQUENCE = 1024
SHAPES = {
    "0.7B": (24, 1536), "1B": (20, 2048), "2B": (40, 2048), "4B": (64, 2304), "6B": (53, 3072), "8B": (72, 3072),
    "10B": (50, 4096), "12B": (60, 4096), "15B": (78, 4096), "18B": (90, 4096), "20B": (25, 8192), "30B": (37, 8192),
    "40B": (50, 8192), "50B": (62, 8192), "60B": (75, 8192), "68B": (66, 9216), "175B": (96, 12288),
}  # fmt: skip
"""Layers and hidden size."""


def numel_of_layers(layers: int, hidden: int) -> int:
    return layers * (12 * hidden * hidden + 13 * hidden)


def bert_numel(name: str) -> int:
    """With embeddings of 30522 words, positions and two types, their norm, and a pooler."""
    layers, hidden = SHAPES[name]
    embeddings = (30522 + SEQUENCE + 2) * hidden + 2 * hidden
    return numel_of_layers(layers, hidden) + embeddings + hidden * hidden + hidden


def gpt_numel(name: str) -> int:
    """With embeddings of 50257 words, which the head shares, and positions, and a last norm."""
    layers, hidden = SHAPES[name]
    return numel_of_layers(layers, hidden) + (50257 + SEQUENCE) * hidden + 2 * hidden


def bert_params(name: str) -> list[ParamInfo]:
    layers, h = SHAPES[name]
    modules: list[tuple[str, Sequence[tuple[int, ...]]]] = [
        ("words", [(30522, h)]), ("positions", [(SEQUENCE, h)]), ("types", [(2, h)]), ("norm", [(h,), (h,)]),
    ]  # fmt: skip
    for layer in range(layers):
        modules += [(f"layer.{layer}.{part}", [(h, h), (h,)]) for part in ("query", "key", "value", "dense")]
        modules += [(f"layer.{layer}.norm1", [(h,), (h,)]), (f"layer.{layer}.up", [(4 * h, h), (4 * h,)])]
        modules += [(f"layer.{layer}.down", [(h, 4 * h), (h,)]), (f"layer.{layer}.norm2", [(h,), (h,)])]
    modules.append(("pooler", [(h, h), (h,)]))
    return [param(f"{m}.{i}", *s, dtype="float16") for m, shapes in modules for i, s in enumerate(shapes)]


def bert_like(name: str) -> Schedule:
    """One operator reads each parameter in forward and makes its gradient in backward; no activations."""
    params = bert_params(name)
    order = range(len(params))
    return schedule(params, [op([i]) for i in order], [op([i], [i]) for i in reversed(order)])
