"""Programs in pages of the documentation, and what they find when they run: small models, data, machines and folders.

A page's programs may name what the reader has: ``model``, ``batches``, a folder with a pretrained model. Here these are
small. ``chunkc.compile`` is called as the page does, but for an emulated device so small that chunks have to move. A
``diff`` holds two programs, the one with plain PyTorch and the one with chunkc.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import VOCABULARY, llama
from torch import nn

import chunkc

ROOT = Path(__file__).parents[3]
FOLDERS = re.compile(r'"(?:/models/)?(?:my-model|llama-3-8b)"')
NUM_BATCHES = 4
NUM_HIDDEN = 12  # 16 KiB each, so that parameters take more than activations do


def programs(page: str, language: str) -> list[str]:
    """The fenced blocks of ``docs/<page>`` in a language."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def side(diff: str, mark: str) -> str:
    """The program before (``-``) or after (``+``) a change."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line or line[0] in (" ", mark))


class Output(NamedTuple):
    loss: torch.Tensor


class Net(nn.Module):
    """Predicts each token from itself: ``input_ids`` and ``labels`` are int64 [batch, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        hidden = [nn.Linear(64, 64) for _ in range(NUM_HIDDEN)]
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), *hidden, nn.Linear(64, VOCABULARY))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.layers(self.embedding(input_ids))
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def seeded(build: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = build()
        return model.train()


def tokens(seed: int, rows: int = 2) -> torch.Tensor:
    """Int64 [rows, 8]."""
    return torch.randint(VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(seed))


def batches(num: int = NUM_BATCHES) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(i), "labels": tokens(i)} for i in range(num)]


def samples(num: int = 8) -> list[dict[str, torch.Tensor]]:
    """Rows of a data set, int64 [8] each."""
    return [{"input_ids": tokens(i, 1)[0], "labels": tokens(i, 1)[0]} for i in range(num)]


def small_llama() -> nn.Module:
    model = llama(layers=1)
    model.config.use_cache = False
    model.loss_type = "ForCausalLM"
    return model


class Reader:
    """What stands in for the reader's machine, by ``monkeypatch``; ``compiled`` has the models of the latest program.

    ``device_memory`` is as much as the small models need to train with chunks that move; ``options`` go to every
    ``chunkc.compile`` that does not say otherwise.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, device_memory: str, **options: Any) -> None:
        self.folder, self.options, self.hw = folder, options, f"emulated-{device_memory}-64m"
        self.compiled: list[nn.Module] = []
        self._compile, self._plan = chunkc.compile, chunkc.plan
        patch.setattr(chunkc, "compile", self.compile)
        patch.chdir(folder)

    def compile(self, model: nn.Module, hw: str = "auto", **options: Any) -> nn.Module:
        """Compile for the small device; several devices, or a division of the model data, are planned before."""
        machine = chunkc.Hardware.detect() if hw == "auto" else chunkc.Hardware.parse(hw)
        shard = options.pop("shard", "all")
        if machine.num_gpus > 1:
            plan = self._plan(model, hw, example_inputs=batches(1)[0], shard=shard, backend="eager")
            assert plan.hw == str(machine)
        options = {"backend": "eager", "chunk_size": 4096, **self.options, **options}
        self.compiled.append(self._compile(model, self.hw, **options))
        return self.compiled[-1]

    def run(self, program: str, names: dict[str, Any], page: str) -> dict[str, Any]:
        """Run a program of a page, which may change ``names``."""
        self.compiled.clear()
        source = FOLDERS.sub(repr(str(self.folder / "pretrained")), program)
        exec(compile(source, f"docs/{page}", "exec"), names)
        return names

    def write_pretrained(self) -> None:
        """A folder as transformers' ``save_pretrained`` writes it."""
        seeded(small_llama).save_pretrained(self.folder / "pretrained")


def assert_same_values(ours: nn.Module, plain: nn.Module) -> None:
    """All parameters and buffers, by element; after a few updates of at most about 1e-3 each."""
    expected, found = plain.state_dict(), ours.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def changed(model: nn.Module, since: dict[str, torch.Tensor]) -> Iterator[str]:
    """Names of parameters that are others than before."""
    for name, value in model.state_dict().items():
        if not torch.equal(value, since[name]):
            yield name
