"""Training in fp16, in three places, with steps that overflow."""

from typing import Any

import torch
from overflows import Poisoned, poisonous
from pair import MIXED, Pair, batch

from chunkc.compiler.compiled_model import compiled_of

BAD = (1, 4, 5)
"""Steps in which a gradient is infinite or NaN."""

PLACES = {"resident": "emulated-64m-1g", "moving": "emulated-448k-16m", "mixed": "emulated-640k-16m"}


def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (*batch(step % 3), poisonous(step % 2) if step in BAD else torch.zeros(192))


def make(place: str, **options: Any) -> Pair:
    wishes = MIXED if place == "mixed" else None
    return Pair(PLACES[place], Poisoned(), wishes, **{"dtype": torch.float16, **options})


def restart(pair: Pair) -> None:
    pair.restart()
    runtime = compiled_of(pair.model).runtime
    runtime.clipping.is_scaled_outside = False
    runtime.clipping.loss_scale.load_state_dict(torch.amp.GradScaler("cpu").state_dict())


def built_in(pair: Pair, step: int) -> None:
    pair.model(*inputs(step)).backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
