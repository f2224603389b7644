"""TRL's trainers over a compiled model beside TRL's own, from a model in a folder and with adapters."""

from pathlib import Path

import pytest
from job import Pool
from rank_trainers import train_by_trl
from training import LOSS_TOLERANCE, assert_close_elements

import chunkc

pytest.importorskip("peft", reason="runs where peft is installed, as `make test` does")
pytest.importorskip("trl", reason="runs where trl is installed, by the extra `trl`")
trl_runs = pytest.importorskip("trl_runs")

LIMIT = 1e-3 * trl_runs.LR  # of (b): a thousandth of the largest update
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, on its options


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_adapters_train_as_under_trl(kind: str, tmp_path: Path) -> None:
    """Acceptance (b), with accumulation and clipping; the reference of DPO is the model without adapters."""
    trl_runs.write_model(tmp_path / "model")
    losses, values, _ = trl_runs.run(kind, False, tmp_path)
    found, ours, trainer = trl_runs.run(kind, True, tmp_path)
    assert found == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert_close_elements(ours, values, LIMIT, "parameters")
    stats = chunkc.stats(trainer.model)
    assert stats["num_foreign_steps"] == 0 and stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


def test_a_reference_outside_of_the_plan_is_refused(tmp_path: Path) -> None:
    folder = trl_runs.write_model(tmp_path / "model")
    with pytest.raises(chunkc.ChunkcError, match="would be a second model outside of the plan: pass peft_config="):
        trl_runs.make("dpo", True, tmp_path, peft_config=None, model=folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_train_as_under_trls_ddp(two_ranks: Pool, tmp_path: Path) -> None:
    trl_runs.write_model(tmp_path / "model")
    plain, ours = (two_ranks.run(train_by_trl, "sft", is_ours, str(tmp_path)) for is_ours in (False, True))
    for found, wanted in zip(ours, plain, strict=True):
        assert found.losses == pytest.approx(wanted.losses, rel=LOSS_TOLERANCE)
        assert_close_elements(found.values, wanted.values, LIMIT, "parameters")
