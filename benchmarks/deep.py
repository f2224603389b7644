"""Schedules of deep models from captures of shallow ones: GPT-2 blocks of any width and depth.

Layers are equal, so the operators of a deeper model are those of a shallower one again, and bytes alive grow by as much
with each layer. Captures of three and of four layers say what one layer adds; `deepen` repeats it. The result equals a
capture of the deeper model, operator by operator (tests/benchmarks/test_deep.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from chunkc.baselines.stretches import runs_of
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.ir.schedule import GraphSchedule, Operator, ParamInfo, Schedule

SHALLOW, DEEPER = 3, 4
VOCABULARY = 30522
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Classifier(nn.Module):
    """GPT-2's blocks under a head of two classes for the first token, without logits of a vocabulary."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.transformer = GPT2Model(config)
        self.classifier = nn.Linear(config.n_embd, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The loss of a batch of tokens."""
        hidden = self.transformer(input_ids).last_hidden_state
        loss: torch.Tensor = self.classifier(hidden[:, 0]).float().logsumexp(-1).mean()
        return loss


def schedule_of(
    layers: int, hidden: int, batch: int, *, heads: int = 16, seq: int = 1024, dtype: torch.dtype = torch.float16
) -> Schedule:
    """One eager iteration with activation checkpointing: attention written out, nothing fused."""
    if layers <= DEEPER:
        return captured(layers, hidden, batch, heads, seq, dtype)
    shallow, deeper = (captured(n, hidden, batch, heads, seq, dtype) for n in (SHALLOW, DEEPER))
    return deepen(shallow, deeper, layers)


def captured(layers: int, hidden: int, batch: int, heads: int, seq: int, dtype: torch.dtype) -> Schedule:
    """The capture of a model of so many layers."""
    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=seq, vocab_size=VOCABULARY, use_cache=False,
        bos_token_id=None, eos_token_id=None, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = Classifier(config).train()
        tokens = torch.empty(batch, seq, dtype=torch.long)
    model.transformer.activation_checkpointing_enable()
    return capture_ahead(model, dtype, {"input_ids": tokens}, "eager").schedule


def deepen(shallow: Schedule, deeper: Schedule, layers: int) -> Schedule:
    """The schedule with ``layers`` layers, from those with three and with four."""
    params, moved = _params(deeper, layers)
    graphs = tuple(
        GraphSchedule(now.kind, tuple(_operators(before, now, layers, moved)))
        for before, now in zip(shallow.graphs, deeper.graphs, strict=True)
    )
    return replace(deeper, params=params, forward=graphs[0], backward=graphs[1])


def _params(deeper: Schedule, layers: int) -> tuple[tuple[ParamInfo, ...], list[tuple[int, int]]]:
    """All parameters; for each of ``deeper`` its new index in layer 0 (or alone) and the step per layer.

    Those of the last layer, and behind it, are counted from the last layer.
    """
    numbers = [_number(info.name) for info in deeper.params]
    width = numbers.count(0)
    first = numbers.index(0)
    found = list(deeper.params[: first + width])
    for layer in range(1, layers):
        for info in deeper.params[first : first + width]:
            found.append(replace(info, name=_renumbered(info.name, layer)))
    found += deeper.params[first + DEEPER * width :]
    moved = []
    for index, number in enumerate(numbers):
        if number is not None:
            moved.append((index - number * width, width))
        else:
            moved.append((index + (width * (layers - DEEPER) if index > first else 0), 0))
    return tuple(found), moved


def _operators(
    before: GraphSchedule, now: GraphSchedule, layers: int, moved: Sequence[tuple[int, int]]
) -> Iterator[Operator]:
    """Runs of operators in order: those of middle layers again and again, others once."""
    runs, old_runs = runs_of(now.operators), runs_of(before.operators)
    numbers = [_number(name) for name, _ in runs]
    firsts, seconds = runs[numbers.index(1)][1], runs[numbers.index(2)][1]
    descending = numbers.index(2) < numbers.index(1)
    old_middle = {_number(name): ops for name, ops in old_runs}[1]
    old_others = iter([run for run in old_runs if _number(run[0]) != 1])
    wrote_middle = False
    for (_, ops), number in zip(runs, numbers, strict=True):
        if number in (1, 2):
            if not wrote_middle:
                middle = range(1, layers - 1)
                for layer in reversed(middle) if descending else middle:
                    growths = zip(firsts, seconds, old_middle, strict=True)
                    for first, second, old in growths:
                        grown = _grown(first, first, second, layer - 1)
                        yield _numbered(_grown(grown, old, first, layers - DEEPER), layer, moved)
            wrote_middle = True
            continue
        _, old_ops = next(old_others)
        for op, old in zip(ops, old_ops, strict=True):
            layer = 0 if number in (0, None) else layers - 1
            yield _numbered(_grown(op, old, op, layers - DEEPER), layer, moved)


def _grown(op: Operator, low: Operator, high: Operator, times: int) -> Operator:
    """``op`` with as many times more bytes alive as ``high`` has more than ``low``."""
    return replace(
        op,
        live_nbytes=op.live_nbytes + times * (high.live_nbytes - low.live_nbytes),
        live_after_nbytes=op.live_after_nbytes + times * (high.live_after_nbytes - low.live_after_nbytes),
    )


def _numbered(op: Operator, layer: int, moved: Sequence[tuple[int, int]]) -> Operator:
    def at(params: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(moved[p][0] + moved[p][1] * layer for p in params)

    name = op.layer if _number(op.layer) is None else _renumbered(op.layer, layer)
    return replace(op, reads=at(op.reads), grads=at(op.grads), layer=name)


def _number(path: str) -> int | None:
    found = _NUMBER.search(path)
    return int(found[0]) if found else None


def _renumbered(path: str, layer: int) -> str:
    return _NUMBER.sub(str(layer), path, count=1)
