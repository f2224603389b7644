"""A run that finds its graphs and loops where an earlier one kept them is the run that captures them, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import CASES
from torch._dynamo.utils import counters
from training import SEMANTICS, Trained, assert_same_bits, train

import chunkc
from chunkc._torch_compat.capture_cache import keeps_captures

pytestmark = pytest.mark.skipif(not keeps_captures(), reason="torch before 2.13 keeps no capture of tensor subclasses")

F32, BF16 = torch.float32, torch.bfloat16
RECIPE = replace(SEMANTICS, num_steps=3)
NAMES = ("odd", "gpt2_checkpointed", "gpt2_dropout", "resnet", "bert", "albert", "t5", "vit")
CASES_RUN = [
    ("odd_dropout", BF16),
    pytest.param("llama", BF16, marks=pytest.mark.slow),
    *(pytest.param(name, F32, marks=pytest.mark.slow) for name in NAMES),
]


def run(name: str, dtype: torch.dtype) -> tuple[Trained, str, int]:
    """The run of a new model, the digest of its plan, and how many captures it found."""
    case, hits = CASES[name], counters["aot_autograd"]["autograd_cache_hit"]
    model = chunkc.compile(case.build(), "emulated-1m-64m", dtype=dtype, backend="inductor", chunk_size=4096)
    found = train(model, case.batches(), RECIPE.ours(model.parameters()), RECIPE)
    return found, chunkc.plan_of(model).digest(), counters["aot_autograd"]["autograd_cache_hit"] - hits


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), CASES_RUN)
def test_a_run_that_finds_its_graphs_is_the_run_that_captures_them(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CHUNKC_CACHE", "0")
    wanted, digest, num_found = run(name, dtype)
    assert num_found == 0
    monkeypatch.delenv("CHUNKC_CACHE")
    for num_hits in (0, 1):
        found, digest_of_found, num_found = run(name, dtype)
        assert num_found == num_hits
        assert digest_of_found == digest
        assert_same_bits(found, wanted)
