"""``trainer_state.json`` from strangers and of killed runs: refused by name, or what Trainer goes on from."""

import json
import logging
from pathlib import Path

import pytest
import transformers
from mutations import check_mutations, num_mutations
from transformers.trainer_callback import TrainerState

from chunkc import CheckpointError
from chunkc.integrations.hf import ChunkcTrainer
from chunkc.integrations.hf_state import STATE_NAME, check_trainer_state, newest_complete


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    state = TrainerState(
        epoch=0.5,
        global_step=4,
        max_steps=8,
        train_batch_size=2,
        total_flos=10**20,
        log_history=[{"loss": 1.5, "step": 2}, {"loss": float("nan"), "step": 4}],
        best_metric=float("nan"),
        best_model_checkpoint="checkpoint-2",
        stateful_callbacks=[transformers.trainer_callback.TrainerControl()],
    )
    state.save_to_json(str(folder / STATE_NAME))
    return folder


def test_what_trainer_writes_is_taken(folder: Path) -> None:
    check_trainer_state(folder)
    TrainerState().save_to_json(str(folder / STATE_NAME))
    check_trainer_state(folder)
    (folder / STATE_NAME).write_text('{"global_step": 0}', encoding="utf-8")
    check_trainer_state(folder)


def test_mutations_are_refused_or_trainer_goes_on_from_them(
    folder: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    path = folder / STATE_NAME

    def use(mutated: Path) -> None:
        path.write_bytes(mutated.read_bytes())
        try:
            check_trainer_state(folder)
        except CheckpointError as error:
            assert str(path) in str(error)
            raise CheckpointError(f"{mutated.name}: {error}", path=folder) from error
        state = TrainerState.load_from_json(str(path))
        assert type(state.global_step) is int and state.global_step >= 0
        assert all(isinstance(line, dict) for line in state.log_history)
        assert isinstance(state.total_flos, (int, float))
        state.save_to_json(str(tmp_path / "again"))

    refused, taken = check_mutations(
        path.read_bytes(), tmp_path / "mutated", use, range(num_mutations(pytestconfig)), CheckpointError
    )
    print(f"trainer_state.json: {refused} refused, {taken} taken")
    assert refused > 0 and taken > 0


BROKEN = {
    "deep": ("[" * 10**5, "nested more than 64 deep"),
    "no text": (b"\xff", "byte 0 is no UTF-8 text"),
    "torn": ('{"global_step": 4', "holds no JSON"),
    "twice": ('{"global_step": 4, "global_step": 9}', "'global_step' stands twice"),
    "list": ("[]", "must be an object"),
    "nothing": ("{}", "global_step is missing"),
    "text": ('{"global_step": "4"}', "global_step: must be a whole number.*'4'"),
    "line": ('{"global_step": 4, "log_history": [{}, 3]}', r"log_history\[1\]: must be an object, found 3"),
    "unknown": ('{"global_step": 4, "steps": 4}', "has no fields steps"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_state_that_is_none_is_named_and_passed_over(
    what: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, said = BROKEN[what]
    newer = folder.with_name("checkpoint-10")
    newer.mkdir()
    (newer / STATE_NAME).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=said) as caught:
        check_trainer_state(newer)
    assert str(newer / STATE_NAME) in str(caught.value)
    with caplog.at_level(logging.WARNING, "chunkc"):
        assert newest_complete(folder.parent) == str(folder)
    assert [r.getMessage() for r in caplog.records] == [f"checkpoint-10 is passed over: {caught.value}"]


def test_a_folder_in_place_of_the_state_is_named(folder: Path) -> None:
    (folder / STATE_NAME).unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        check_trainer_state(folder)
    (folder / STATE_NAME).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_trainer_state(folder)
    assert newest_complete(folder.parent) is None


def test_a_checkpoint_that_is_named_is_checked_before_anything_is_loaded(folder: Path) -> None:
    (folder / STATE_NAME).write_text('{"global_step": -3}', encoding="utf-8")
    trainer = ChunkcTrainer.__new__(ChunkcTrainer)
    with pytest.raises(CheckpointError, match=r"global_step: must be a whole number.*-3"):
        trainer.train(str(folder))
    assert json.loads((folder / STATE_NAME).read_text(encoding="utf-8")) == {"global_step": -3}
