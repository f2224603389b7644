"""What the tests of weights run on every rank of a job."""

from pathlib import Path
from typing import Any

import torch
from rank_checkpoints import HW, Session, full_disk, raised, rank
from tiny_transformers import TINY_GPT
from torch import nn

import chunkc
from chunkc.weights.load import LoadReport


def trained(num_steps: int) -> Session:
    run = Session()
    run.train(0, num_steps)
    return run


def state_of(model: nn.Module) -> dict[str, torch.Tensor] | None:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    return found if rank() == 0 else None


def save_weights(directory: Path, num_steps: int, max_shard_size: int) -> tuple[tuple[Path, ...], Any]:
    run = trained(num_steps)
    return chunkc.save_safetensors(run.model, directory, max_shard_size=max_shard_size), state_of(run.model)


def save_weights_full(directory: Path, num_steps: int) -> tuple[str, list[float]]:
    """What is raised where rank 0's disk takes no more, and how training goes on."""
    run = trained(num_steps)
    with full_disk(is_full=rank() == 0):
        text = raised(lambda: chunkc.save_safetensors(run.model, directory))
    return text, run.train(num_steps, num_steps + 1)


def load_weights(path: Path, num_steps: int) -> tuple[LoadReport, Any, list[float]]:
    run = Session(seed=5)
    run.train(0, num_steps)
    report = chunkc.load_pretrained(run.model, path)
    return report, state_of(run.model), run.train(2, 3)


def load_weights_refused(path: Path, strict: bool) -> tuple[str, str, Any, Any]:
    """What is raised, of files that rank 1 alone cannot see too, and the values before and after."""
    run = trained(1)
    before = state_of(run.model)
    text = raised(lambda: chunkc.load_pretrained(run.model, path, strict=strict))
    other = raised(lambda: chunkc.load_pretrained(run.model, path if rank() == 0 else path.parent))
    return text, other, before, state_of(run.model)


def tiny_gpt(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = {k: v for k, v in TINY_GPT.config.items() if k != "model_type"}
    return GPT2LMHeadModel(GPT2Config(**config)).to(torch.bfloat16)


def save_gpt(directory: Path) -> dict[str, torch.Tensor] | None:
    """The values of a compiled model after a step, which ``save_pretrained`` has written."""
    model = chunkc.compile(tiny_gpt(3), HW, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).view(2, 8) + rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.save_pretrained(directory)
    return state_of(model)


def load_part(path: Path) -> tuple[tuple[str, ...], Any, list[float]]:
    """A model from the meta device of which the files lack a layer: what was initialised, values, next numbers."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    chunkc.compile(model, HW, dtype=torch.float32, backend="eager")
    torch.manual_seed(11)
    report = chunkc.load_pretrained(model, path)
    return report.initialised_keys, state_of(model), torch.rand(3).tolist()
