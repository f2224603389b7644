"""The four short examples run in a budget that forces moves; the parts of docs/patterns.md train as plain PyTorch."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chunkc

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/patterns.md").read_text(encoding="utf-8"), re.M | re.S)
LEAST = {"gan": "mean_radius", "contrastive": "final_loss", "distillation": "final_loss", "reinforce": "final_reward"}


@pytest.mark.long(but="gan")
@pytest.mark.parametrize("name", LEAST)
def test_a_short_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module(name)
    assert example.main(["--backend=eager", "--steps=8"]) == 0
    *reports, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{LEAST[name]}=[\d.e+-]+", last) and float(last.partition("=")[2]) > 0
    used = [re.search(r"\(([\d.]+) of ([\d.]+) MiB\)$", line) for line in reports]
    assert len(used) == 8 and all(found and float(found[1]) <= float(found[2]) for found in used)


class Net(nn.Module):
    """From ``[4, 24]`` to ``[4, 24]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Plain:
    """What a snippet calls chunkc for, in plain PyTorch."""

    Adam, AdamW = torch.optim.Adam, torch.optim.AdamW

    @staticmethod
    def compile(model: nn.Module, **_: Any) -> nn.Module:
        return model


def final_parameters(block: str, library: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All parameters after a snippet that calls ``library``."""
    models: list[nn.Module] = []

    class Recording:
        Adam, AdamW = staticmethod(library.Adam), staticmethod(library.AdamW)

        @staticmethod
        def compile(model: nn.Module, **wanted: Any) -> nn.Module:
            models.append(model)
            compiled: nn.Module = library.compile(model, **wanted, **options)
            return compiled

    torch.manual_seed(0)
    names = {"chunkc": Recording, "nn": nn, "torch": torch, "Net": Net, "HW": "emulated-90k-16m", "STEPS": 3}
    exec(compile(block, "docs/patterns.md", "exec"), {**names, "batch": lambda: torch.randn(4, 24)})
    return {f"{i}.{n}": copy.deepcopy(v) for i, model in enumerate(models) for n, v in model.state_dict().items()}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_parts_of_the_page_train_as_plain_pytorch(number: int) -> None:
    ours = final_parameters(BLOCKS[number], chunkc, {"dtype": torch.float32, "backend": "eager", "chunk_size": 512})
    plain = final_parameters(BLOCKS[number], Plain, {})
    assert ours.keys() == plain.keys() and ours
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_there_is_a_part_for_each_pattern() -> None:
    assert len(BLOCKS) == 6
