"""An interrupted run and its twin: step counts say whether a call happened; all bits agree and go on from there."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from overflows import Poisoned, poisonous
from pair import MIXED, Pair, Tower, batch
from raise_points import PACKAGE, RaisePoint

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.runtime.model.program_state import ModelPhase

Bits = dict[str, torch.Tensor]
Interruption = AbstractContextManager[Any]


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; ``num_parts`` micro-batches a step.

    ``overflows``: every third step has a gradient that is not finite; the two between let the scale grow again.
    """

    hw: str = "emulated-320k-16m"
    options: dict[str, Any] = field(default_factory=dict)
    wishes: dict[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = None
    num_parts: int = 1
    overflows: bool = False
    is_resumed: bool = False


RECIPES = {
    "host": Recipe(),
    "mixed": Recipe(wishes=MIXED, max_grad_norm=0.5),
    "device": Recipe(hw="emulated-64m-1g"),
    "fp16": Recipe(options={"dtype": torch.float16}, overflows=True, max_grad_norm=0.5),
    "accumulated": Recipe(hw="emulated-480k-16m", options={"accumulate": 2}, num_parts=2),
    "resumed": Recipe(wishes=MIXED, is_resumed=True),
}


class Run:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        torch.manual_seed(0)
        model = Poisoned() if recipe.overflows else Tower(depth=1)
        hw = "emulated-448k-16m" if recipe.overflows else recipe.hw
        pair = Pair(hw, model, recipe.wishes, **recipe.options)
        self.model = pair.model
        self.optimizer = chunkc.AdamW(
            self.model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1, max_grad_norm=recipe.max_grad_norm
        )
        self.runtime = compiled_of(self.model).runtime
        if recipe.overflows:
            self.runtime.clipping.loss_scale.growth_interval = 2

    def inputs(self, number: int, part: int) -> tuple[torch.Tensor, ...]:
        found = batch(number * self.recipe.num_parts + part)
        if not self.recipe.overflows:
            return found
        return (*found, poisonous(0) if number % 3 == 2 else torch.zeros(192))

    def iterate(self, number: int, call: str = "", interruption: Interruption | None = None) -> None:
        last = self.recipe.num_parts - 1
        points = {(call, last): nullcontext() if interruption is None else interruption}
        try:
            for part in range(self.recipe.num_parts):
                with points.get(("forward", part), nullcontext()):
                    loss = self.model(*self.inputs(number, part))
                with points.get(("backward", part), nullcontext()):
                    loss.backward()
            with points.get(("step", last), nullcontext()):
                self.optimizer.step()
        except KeyboardInterrupt:
            assert interruption is not None
        self.optimizer.zero_grad()

    def bits(self) -> Bits:
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        if self.runtime.clipping.loss_scale is not None:
            scale = self.runtime.clipping.loss_scale.state_dict()
            found["scale"] = torch.tensor([scale["scale"], scale["_growth_tracker"]])
        return found


class Twins:
    """A run that is interrupted and one that is not; ``outcomes`` counts calls that had happened or had not."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.directory, self.recipe = directory, recipe
        self.runs = Run(recipe), Run(recipe)
        self.number, self.outcomes = 0, Counter[str]()
        for _ in range(3):
            self._iterate()
        self._save(self.runs[1])
        self._saved = self.runs[1].bits()
        if recipe.is_resumed:
            for run in self.runs:
                self._load(run)
        self.check()

    def num_points(self, call: str, *, per_instruction: bool = False) -> int:
        point = RaisePoint(per_instruction=per_instruction)
        if call in ("save", "load"):
            self._interrupt_files(call, point)
        else:
            self.runs[0].iterate(self.number, call, point)
            self.runs[1].iterate(self.number)
            self.number += 1
        self.check()
        return point.num_passed

    def interrupt(self, call: str, interruption: Interruption, *, trains_on: bool = False) -> None:
        """Interrupt one ``call``, compare, and go on; with ``trains_on`` a forward and a backward come before anybody
        has looked at the model."""
        if call in ("save", "load"):
            self._interrupt_files(call, interruption)
            return
        run, twin = self.runs
        before = self._bits
        run.iterate(self.number, call, interruption)
        if trains_on:
            self._try_parts(run)
        twin.iterate(self.number)
        after, found = twin.bits(), run.bits()
        if differences(found, after):
            assert not (wrong := differences(found, before)), wrong
            self.outcomes["undone"] += 1
            run.iterate(self.number)
            assert not (wrong := differences(run.bits(), after)), wrong
        else:
            self.outcomes["done"] += 1
        assert run.runtime.state.phase is not ModelPhase.BROKEN
        self.number, self._bits = self.number + 1, after

    def check(self) -> None:
        run, twin = self.runs
        assert run.runtime.state.phase is not ModelPhase.BROKEN
        self._bits = twin.bits()
        assert not (wrong := differences(run.bits(), self._bits)), wrong

    def _iterate(self) -> None:
        for run in self.runs:
            run.iterate(self.number)
        self.number += 1

    def _try_parts(self, run: Run) -> None:
        for part in range(self.recipe.num_parts):
            run.model(*run.inputs(self.number + 1, part)).backward()
        run.optimizer.zero_grad()

    def _save(self, run: Run) -> None:
        chunkc.save_checkpoint(self.directory, run.model, run.optimizer, keep=2)

    def _load(self, run: Run) -> None:
        chunkc.load_checkpoint(self.directory, run.model, run.optimizer)

    def _interrupt_files(self, call: str, interruption: Interruption) -> None:
        """Save or load; the directory and the run are those before or those after it, and fit each other."""
        run, twin = self.runs
        before, saved = self._bits, self._saved
        try:
            with interruption:
                self._save(run) if call == "save" else self._load(run)
        except KeyboardInterrupt:
            pass
        if call == "save":
            assert not (wrong := differences(run.bits(), before)), wrong
            self._load(run)
        found = run.bits()
        is_saved, is_before = not differences(found, saved), not differences(found, before)
        assert is_saved or is_before
        self.outcomes["done" if is_saved == (call == "load") else "undone"] += 1
        if is_saved or call == "save":
            self._load(twin)
        if call == "save":
            self._saved = found
        self._iterate()
        self.check()


def differences(found: Bits, wanted: Bits) -> list[str]:
    names = found.keys() | wanted.keys()
    return sorted(n for n in names if n not in found or n not in wanted or not torch.equal(found[n], wanted[n]))


def spread(num_points: int, num_wanted: int) -> Iterator[int]:
    step = max(1.0, num_points / num_wanted)
    return (int(k * step) for k in range(min(num_points, num_wanted)))


class Storm:
    """Within the block ``num`` signals come at random moments, and raise only where chunkc is at work."""

    def __init__(self, send: Callable[[], object], delays_s: Sequence[float]) -> None:
        self._send, self._delays_s = send, delays_s
        self._is_armed = False
        self._thread = threading.Thread(target=self._blow)

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._is_armed = True
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_armed = False
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _blow(self) -> None:
        for delay_s in self._delays_s:
            time.sleep(delay_s)
            self._send()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        while self._is_armed and frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                raise KeyboardInterrupt
            frame = frame.f_back
