"""Which models fit which machines by chunkc's own plans: those of Fang et al. (2021, section 9) and one of our own."""

import pytest

from chunkc.baselines import POLICIES, Course, Machine
from chunkc.hardware import Hardware
from chunkc.scenarios.models import Transformer, built_in
from chunkc.scenarios.models.transformer import Head
from chunkc.scenarios.scenario import Answer, Recompute, Scenario, Scenarios

SLOW = pytest.mark.slow


def answer(model: str, hw: str, batch: int = 4) -> Answer:
    return Scenarios().answer(Scenario(built_in(model), Hardware.of(hw), batch, 1024, recompute=Recompute.FULL))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "hw"),
    [
        ("gpt-0.7b", "rtx2060-8g-16g"),
        pytest.param("gpt-8b", "8xv100-120g", marks=SLOW),
        pytest.param("gpt-12b", "v100-240g", marks=SLOW),
        pytest.param("gpt-18b", "8xv100-240g", marks=SLOW),
        pytest.param("gpt-50b", "a100-40g-1024g", marks=SLOW),
        pytest.param("gpt-68b", "8xa100-40g-1024g", marks=SLOW),
        pytest.param("gpt-175b", "4x8xa100-40g-1024g", marks=SLOW),
    ],
)
def test_what_patrickstar_held_fits(model: str, hw: str) -> None:
    found = answer(model, hw)
    assert found.plan is not None, found.shortage
    memory = found.plan.memory
    assert memory.device_peak_nbytes <= memory.device_budget_nbytes
    assert memory.host_nbytes <= memory.host_budget_nbytes


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "fits"), [("gpt-18b", True), ("gpt-20b", False)])
def test_modelled_patrickstar_holds_eighteen_billion_on_eight_v100_and_not_twenty(model: str, fits: bool) -> None:
    """Activations counted; what it could not hold, it could not for want of room for chunks."""
    hw = Hardware.of("8xv100-240g")
    scenario = Scenario(built_in(model), hw, 4, 1024, recompute=Recompute.FULL)
    found = POLICIES["patrickstar"](Course.of(Scenarios().captured(scenario).schedule, model), Machine.of(hw))
    assert (found.timeline is not None) == fits
    assert (found.missing_nbytes > 0) != fits, found.why_not


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "batch", "tflops"),
    [("gpt-20b", 4, 30), ("gpt-20b", 16, 75), ("gpt-30b", 4, 60), ("gpt-33b", 2, 40)],
)
def test_twenty_to_thirty_three_billion_fit_eight_v100(model: str, batch: int, tflops: float) -> None:
    """PatrickStar did not hold them: here optimizer states that the host has no room for stay on the devices. In fp16,
    with loss scaling."""
    found = answer(model, "8xv100-240g", batch)
    assert found.plan is not None and found.timeline is not None, found.shortage
    assert any(name.startswith("os") for name, _ in found.plan.program("forward").entry.resident)
    assert found.timeline.patrickstar_tflops is not None and found.timeline.patrickstar_tflops > tflops


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_billion_train_on_32768_tokens_beside_24_gib() -> None:
    """Layers are computed again, what enters them goes to host memory, and the logits have no gradient."""
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    model = Transformer("llama-3-8b", config, Head.CAUSAL)
    found = Scenarios().answer(Scenario(model, Hardware.of("rtx4090-128g"), 1, 32768, recompute=Recompute.FULL))
    assert found.plan is not None, found.shortage
    assert found.plan.moves and found.plan.memory.device_peak_nbytes <= found.plan.memory.device_budget_nbytes
