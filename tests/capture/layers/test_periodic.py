"""Schedules of deep models from two shallow captures: equal to captures of them, or refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_transformers import TINY_BERT, TINY_GPT
from torch.torch_version import TorchVersion

from chunkc.capture.graphs import lowest_peak
from chunkc.capture.layers.periodic import (
    BASE,
    MIXTURES,
    NUM_OUTER,
    NotPeriodicError,
    mixed_schedule,
    periodic_schedule,
)
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.compiler.validation import compute_dtype, param_infos, unique_params
from chunkc.hardware import Hardware
from chunkc.ir.schedule import GraphSchedule, Operator, ParamInfo, Schedule
from chunkc.scenarios.models import Transformer

MODELS = {"gpt": TINY_GPT, "bert": TINY_BERT}
HW = Hardware.parse("v100-240g")
MASKS_ALL = TorchVersion(torch.__version__) < "2.13"
"""Dynamo said until then that it exports, for which Hugging Face's models make every mask."""


def estimates(transformer: Transformer, recompute: bool, hw: Hardware = HW) -> tuple[Schedule, ...]:
    """The captured schedule by each estimate of its live bytes."""
    model = transformer.build(recompute=recompute)
    dtype = compute_dtype("auto", list(unique_params(model)), hw)
    inputs = transformer.inputs(2, 16)
    return capture_ahead(model, dtype, inputs, "inductor", gpu=hw.compute_capability).estimates


def check_captures(family: str, recompute: bool, depths: Sequence[int]) -> None:
    """By every estimate: which of them is lowest may change with the depth."""
    shallow, deeper = (estimates(MODELS[family].with_depth(n), recompute) for n in (BASE, BASE + 1))
    for depth in depths:
        direct = estimates(MODELS[family].with_depth(depth), recompute)
        found = [periodic_schedule(*pair, depth, direct[0].params) for pair in zip(shallow, deeper, strict=True)]
        assert found == list(direct)
        assert [schedule.digest() for schedule in found] == [schedule.digest() for schedule in direct]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "spelling", "kernel"),
    [
        ("gpt", "v100-240g", "efficient"),
        ("gpt", "a100-240g", "efficient"),
        pytest.param("bert", "a100-240g", "flash", marks=pytest.mark.skipif(MASKS_ALL, reason="BERT has a mask, too")),
        pytest.param("bert", "a100-240g", "math", marks=pytest.mark.skipif(not MASKS_ALL, reason="BERT has no mask")),
    ],
)
def test_what_a_gpu_saves_of_attention_is_periodic(family: str, spelling: str, kernel: str) -> None:
    """Seeds of 16 and 24 bytes, and rows in blocks of 32, are the same in every layer of a model by its defaults.

    Hugging Face's GPT-2 makes a mask wherever it is traced, which flash attention does not take. BERT's, where it makes
    one, repeats one number, which the efficient kernel does not take either.
    """
    hw = Hardware.parse(spelling)
    dropout = {name: 0.1 for name in MODELS[family].config if "drop" in name}
    model = replace(MODELS[family], config={**MODELS[family].config, **dropout})
    shallow, deeper = (lowest_peak(estimates(model.with_depth(depth), False, hw)) for depth in (BASE, BASE + 1))
    deep = model.with_depth(24).build(recompute=False)
    infos = param_infos(deep, compute_dtype("auto", list(unique_params(deep)), hw))
    schedule = periodic_schedule(shallow, deeper, 24, infos)
    if kernel == "math":
        assert not any("scaled_dot_product" in op.target for op in schedule.forward.operators)
        return
    attending = [op for op in schedule.forward.operators if "scaled_dot_product" in op.target]
    assert len(attending) == 24 and len({op.saved_nbytes for op in attending}) == 1
    assert all(kernel in op.target for op in attending)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "recompute"), [("gpt", False), ("bert", True)])
def test_the_schedule_of_a_deeper_model_is_the_captured_one(family: str, recompute: bool) -> None:
    check_captures(family, recompute, (7,))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_schedules_of_deeper_models_are_the_captured_ones(family: str, recompute: bool) -> None:
    check_captures(family, recompute, (4, 6, 9, 14))


def info(name: str) -> ParamInfo:
    return ParamInfo(name, (), (8, 8), (8, 1), "float32", True)


def operator(name: str, **facts: Any) -> Operator:
    return Operator(name, **{"target": "mm", "reads": (), "grads": (), "flops": 1, "nbytes": 1} | facts)


Edit = Callable[[int, int, Operator], Operator]


def handmade(num_layers: int, edit: Edit = lambda layer, depth, op: op) -> Schedule:
    """Two operators a layer in forward, and two alike behind the head; one a layer in backward."""

    def name(stem: str, number: int) -> str:
        return f"{stem}_{number}" if number else stem

    def made(layer: int, op: Operator) -> Operator:
        return edit(layer, num_layers, op)

    def live(nbytes: int) -> dict[str, int]:
        return {"live_nbytes": nbytes, "live_after_nbytes": nbytes - 8}

    layers = range(num_layers)
    forward = [operator("embedding", **live(64))]
    for i in layers:
        kind = "bfloat16" if i == num_layers - 1 else "float16"
        forward.append(made(i, operator(name("mm", 2 * i), reads=(1 + i,), layer=f"h.{i}", **live(64 + 32 * i))))
        forward.append(made(i, operator(name("mm", 2 * i + 1), dtype=kind, layer=f"h.{i}", **live(96 + 32 * i))))
    forward += [operator("loss", **live(100 + 32 * num_layers))]
    for i in layers:
        forward += [operator(name("t", 2 * i + j), target="t", layer=f"h.{i}", **live(70 + 16 * j)) for j in (0, 1)]
    backward = [operator("ones", **live(100 + 32 * num_layers))]
    for i in reversed(layers):
        number = 2 * num_layers + (num_layers - 1 - i)
        backward.append(operator(f"mm_{number}", grads=(1 + i,), layer=f"h.{i}", **live(64 + 32 * i)))
    backward.append(operator("last", grads=(0,), **live(64)))
    params = (info("embed.weight_0"), *(info(f"h.{i}.weight") for i in layers))
    graphs = GraphSchedule("forward", tuple(forward)), GraphSchedule("backward", tuple(backward))
    return Schedule(params, *graphs, held_nbytes=16 + 4 * num_layers, num_samples=2, num_tokens=32)


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 6, 7, 11, 96])
def test_a_schedule_with_blocks_in_several_places(num_layers: int) -> None:
    expected = handmade(num_layers)
    assert periodic_schedule(handmade(BASE), handmade(BASE + 1), num_layers, expected.params) == expected


def test_numbers_that_no_affine_function_gives_are_refused() -> None:
    def grows(layer: int, depth: int, op: Operator) -> Operator:
        return replace(op, flops=1 + layer**2)

    with pytest.raises(NotPeriodicError, match="affine"):
        periodic_schedule(handmade(BASE, grows), handmade(BASE + 1, grows), 9)


def test_layers_that_differ_in_more_than_numbers_are_refused() -> None:
    def alternates(layer: int, depth: int, op: Operator) -> Operator:
        return replace(op, target="conv" if layer % 2 else "mm")

    with pytest.raises(NotPeriodicError):
        periodic_schedule(handmade(BASE, alternates), handmade(BASE + 1, alternates), 9)


def test_numbers_that_fall_below_zero_are_refused() -> None:
    def falls(layer: int, depth: int, op: Operator) -> Operator:
        return replace(op, nbytes=50 - 9 * layer)

    assert periodic_schedule(handmade(BASE, falls), handmade(BASE + 1, falls), 6) == handmade(6, falls)
    with pytest.raises(NotPeriodicError, match="below zero"):
        periodic_schedule(handmade(BASE, falls), handmade(BASE + 1, falls), 9)


def test_other_parameters_than_those_that_follow_are_refused() -> None:
    params = [*handmade(6).params[:-1], info("h.5.bias")]
    with pytest.raises(NotPeriodicError, match=r"h\.5\.bias"):
        periodic_schedule(handmade(BASE), handmade(BASE + 1), 6, params)
    with pytest.raises(NotPeriodicError, match="their number"):
        periodic_schedule(handmade(BASE), handmade(BASE + 1), 6, handmade(7).params)


def test_fewer_layers_than_captured_are_refused() -> None:
    with pytest.raises(NotPeriodicError, match="fewer than"):
        periodic_schedule(handmade(BASE), handmade(BASE + 1), NUM_OUTER - 1)


# --- layers of two kinds ----------------------------------------------------------------------------------------------


def handmade_mixed(num_again: int, num_kept: int) -> Schedule:
    """Two operators a layer in forward; in backward one where a kept layer is read, two where one is computed again."""
    depth = num_again + num_kept

    def live(num_layers: int) -> dict[str, int]:
        nbytes = 64 + 8 * min(num_layers, num_again) + 32 * max(0, num_layers - num_again)
        return {"live_nbytes": nbytes, "live_after_nbytes": nbytes - 8}

    forward, backward = [operator("embedding", **live(0))], [operator("ones", **live(depth))]
    for i in range(depth):
        name = f"mm_{2 * i}" if i else "mm"
        first = operator(name, reads=(1 + i,), layer=f"h.{i}", **live(i))
        second = operator(f"mm_{2 * i + 1}", layer=f"h.{i}", **live(i + 1))
        if i >= num_again:
            first = replace(first, saved_nbytes=32, read_by=(depth - i, depth - i), used_until=2 * i + 2)
        forward += [first, second]
    for i in reversed(range(depth)):
        name = f"mm_{2 * i}" if i else "mm"
        again = [operator(name, reads=(1 + i,), layer=f"h.{i}", **live(i))] if i < num_again else []
        backward += [*again, operator(f"mm_{3 * depth - 1 - i}", grads=(1 + i,), layer=f"h.{i}", **live(i))]
    params = (info("embed.weight_0"), *(info(f"h.{i}.weight") for i in range(depth)))
    graphs = GraphSchedule("forward", tuple(forward)), GraphSchedule("backward", tuple(backward))
    return Schedule(params, *graphs, num_samples=2, num_tokens=32)


@pytest.mark.parametrize(("num_again", "num_kept"), [(2, 2), (2, 9), (3, 7), (8, 3), (5, 5), (40, 56)])
def test_layers_computed_again_before_kept_ones(num_again: int, num_kept: int) -> None:
    captures = {pair: handmade_mixed(*pair) for pair in MIXTURES}
    expected = handmade_mixed(num_again, num_kept)
    assert mixed_schedule(captures, num_again, num_kept, expected.params) == expected
    with pytest.raises(NotPeriodicError):
        mixed_schedule(captures | {MIXTURES[0]: handmade_mixed(BASE, BASE + 2)}, num_again, num_kept)
