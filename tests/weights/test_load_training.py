"""Weights loaded while a model is trained: between micro-batches, and wherever its optimizer states stand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import CASES
from placements import MIXED
from plan_runner import PlanRunner
from pretrained import assert_same
from safetensors.torch import save_file
from small import Small, twins_at
from training import PLACEMENT, Trained, assert_same_bits

import chunkc


@pytest.mark.parametrize("num_before", range(4))
def test_loading_in_a_window_of_micro_batches(num_before: int, tmp_path: Path) -> None:
    """Gradients that stand beside the parameters go on, as after ``load_state_dict`` of the plain twin."""
    source = Small().state_dict()
    save_file(source, tmp_path / "model.safetensors")
    twins = twins_at("settled", accumulate=3)
    for number in range(3):
        if number == num_before:
            chunkc.load_pretrained(twins.model, tmp_path, strict=True)
            twins.plain.load_state_dict(source)
        twins.backward()
        twins.check_gradients()
    if num_before == 3:
        chunkc.load_pretrained(twins.model, tmp_path, strict=True)
        twins.plain.load_state_dict(source)
    twins.check_params()
    twins.check_training()


@pytest.mark.long
def test_loading_reaches_states_on_the_device_in_the_stream_and_on_the_host(tmp_path: Path) -> None:
    """Eight steps with a load between two of them, updates pending: the same bits in every placement."""
    runner, recipe = PlanRunner(CASES["odd"], torch.bfloat16), replace(PLACEMENT, num_steps=8)
    source = {name: (value * 0.5).contiguous() for name, value in CASES["odd"].build().state_dict().items()}
    save_file(source, tmp_path / "model.safetensors")
    trained_names = {name for name, param in runner.model.named_parameters() if param.requires_grad}
    trained_source = {name: value for name, value in source.items() if name in trained_names}

    def load(step: int, _: torch.optim.Optimizer) -> None:
        if step == 4:
            chunkc.load_pretrained(runner.model, tmp_path, strict=True)
            assert_same({n: v for n, v in runner.model.state_dict().items() if n in trained_names}, trained_source)

    def trained(placement: str, *, loads: bool = True) -> Trained:
        return runner.train(MIXED[placement](runner), recipe, after_step=load if loads else None)

    wanted = trained("all_resident")
    for placement in ("some_of_each", "whole_and_streamed", "all_streamed"):
        assert_same_bits(trained(placement), wanted)
    with pytest.raises(AssertionError):
        assert_same_bits(trained("all_resident", loads=False), wanted)
