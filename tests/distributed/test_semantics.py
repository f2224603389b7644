"""Case 16 over cases 1 and 12: ranks train as one process does on the global batch, wherever their chunks lie.

Each rank takes an equal part of every batch. Gradients of the first step, and parameters, moments and losses after some
steps equal those of eager PyTorch with torch.optim.AdamW under (b), and are the same bits on all ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accumulating import train_large
from job import Pool
from models import CASES
from rank_training import (
    QUICK,
    ROOMY,
    Done,
    Work,
    check_buffers,
    check_semantics,
    parts_of,
    together,
    train,
    train_all,
    train_averaged,
)
from training import PLACEMENT, SEMANTICS, Recipe, Trained, assert_same_bits, train_measured

pytestmark = pytest.mark.distributed
SPANNING_NUMEL = 4096
SLOW_MODELS = ("gpt2", "llama", "bert", "albert", "t5", "vit", "mixtral", "odd")


def runs_of(found: list[Done]) -> list[Trained]:
    """What every rank trained."""
    return [done.trained for done in found]


def work_of(name: str, recipe: Recipe = QUICK, **options: object) -> Work:
    """In chunks so small that a parameter of the odd model takes several."""
    wishes = {"chunk_numel": SPANNING_NUMEL} if name == "odd" else {}
    return Work(name, recipe, wishes=wishes, **options)  # type: ignore[arg-type]


@pytest.mark.long(but="gpt2_small-smallest")
@pytest.mark.parametrize(
    ("name", "hw"),
    [
        pytest.param("odd", None, id="odd-smallest"),
        pytest.param("odd", ROOMY, id="odd-resident"),
        pytest.param("gpt2_small", None, id="gpt2_small-smallest"),
        pytest.param("gpt2_small", ROOMY, id="gpt2_small-resident", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(name: str, hw: str | None, two_ranks: Pool) -> None:
    found = two_ranks.run(train, work_of(name, hw=hw))
    check_semantics(runs_of(found), train_large(CASES[name], QUICK, 2))
    assert all((done.stats["h2d_nbytes"] > 0) == (hw is None) for done in found)
    assert all(done.stats["comm_nbytes"] > 0 for done in found)


@pytest.mark.long
def test_two_ranks_train_by_sgd_as_one_process(two_ranks: Pool) -> None:
    recipe = replace(QUICK, optimizer="sgd", lr=0.05)
    found = two_ranks.run(train, work_of("odd", recipe, hw=None))
    check_semantics(runs_of(found), train_large(CASES["odd"], recipe, 2))
    assert all(done.stats["h2d_nbytes"] > 0 for done in found)


def test_a_rank_that_keeps_its_gradients_to_itself_is_noticed() -> None:
    """The mutation: what rank 0's half alone trains is refused by the comparison, in every step's number."""
    wanted, case = train_large(CASES["odd"], QUICK, 2), CASES["odd"]
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), **QUICK.options)
    alone = train_measured(model, parts_of(case, QUICK, 0, 2), optimizer, QUICK)
    with pytest.raises(AssertionError, match=r"gradients: .* is off by"):
        check_semantics([alone, alone], wanted)
    for kept in ("gradients", "losses"):
        alone = replace(alone, **{kept: getattr(wanted, kept)})
    with pytest.raises(AssertionError, match=r"parameters: .* is off by"):
        check_semantics([alone, alone], wanted)
    with pytest.raises(AssertionError, match="differ in"):
        together([alone, wanted])


@pytest.mark.long
def test_batch_norms_of_each_rank_are_its_own(two_ranks: Pool) -> None:
    """All begin with the buffers of rank 0; from then on each has seen its own part only."""
    runs = runs_of(two_ranks.run(train, Work("resnet", hw=None)))
    wanted, buffers = train_averaged(CASES["resnet"], QUICK, 2)
    check_semantics(runs, wanted)
    check_buffers(runs, buffers)
    assert any(not torch.equal(runs[0].buffers[n], runs[1].buffers[n]) for n in buffers[0])


@pytest.mark.long
def test_placements_give_the_same_bits(two_ranks: Pool) -> None:
    """Acceptance (a) on two ranks: everything resident, all on the host, little room, and the smallest that works."""
    recipe = replace(PLACEMENT, num_steps=5)
    device = {"os_home": "device", "chunk_numel": SPANNING_NUMEL}
    host = {"os_home": "host", "chunk_numel": SPANNING_NUMEL}
    works = [
        Work("odd", recipe, wishes=device),
        Work("odd", recipe, wishes=host),
        Work("odd", recipe, wishes=host | {"num_resident_states": 2, "streamed_share": 0.4}),
        work_of("odd", recipe, hw=None),
    ]
    found = two_ranks.run(train_all, works)
    identity, *others = (together(list(runs)) for runs in zip(*map(runs_of, found), strict=True))
    for other in others:
        assert_same_bits(other, identity)
    moved = [done.stats["h2d_nbytes"] for done in found[0]]
    assert moved[0] == 0 and min(moved[1:]) > 0


@pytest.mark.long
def test_groups_that_come_back_for_gradients_alone_give_the_same_bits(two_ranks: Pool) -> None:
    """In chunks of 64 elements a tied embedding has groups of its own; the smallest plan opens them for gradients."""
    recipe = replace(PLACEMENT, num_steps=3)
    wishes = {"os_home": "host", "chunk_numel": 64}
    works = [Work("gpt2_small", recipe, hw=hw, wishes=wishes) for hw in (ROOMY, None)]
    found = two_ranks.run(train_all, works)
    stays, opened = (together(list(runs)) for runs in zip(*map(runs_of, found), strict=True))
    assert_same_bits(opened, stays)
    assert all(rank[0].num_opened == 0 < rank[1].num_opened for rank in found)


@pytest.mark.long
@pytest.mark.parametrize("hw", [ROOMY, pytest.param(None, marks=pytest.mark.slow)], ids=["roomy", "smallest"])
def test_saved_values_that_move_give_the_same_bits(hw: str | None, two_ranks: Pool) -> None:
    """With dropout, on two ranks that share the chunks: kept, and moved, also in the least memory that works."""
    recipe = replace(PLACEMENT, num_steps=3)
    moving = {"moved_share": 1.0, "activations": "offload", "os_home": "host"}
    works = [
        Work("gpt2_dropout", recipe, wishes={"os_home": "host"}),
        Work("gpt2_dropout", recipe, wishes=moving, hw=hw),
    ]
    found = two_ranks.run(train_all, works)
    kept, moved = (together(list(runs)) for runs in zip(*map(runs_of, found), strict=True))
    assert_same_bits(moved, kept)
    moved_nbytes = [[done.stats["moved_saved_nbytes"] for done in rank] for rank in found]
    assert all(rank[0] == 0 < rank[1] for rank in moved_nbytes)


@pytest.mark.long
def test_inductor(two_ranks: Pool) -> None:
    found = two_ranks.run(train, Work("odd", hw=None, backend="inductor", wishes={"chunk_numel": 16384}))
    check_semantics(runs_of(found), train_large(CASES["odd"], QUICK, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_MODELS)
def test_four_ranks_train_as_one_process(name: str, four_ranks: Pool) -> None:
    found = four_ranks.run(train, work_of(name, SEMANTICS, hw=None), timeout_s=400)
    check_semantics(runs_of(found), train_large(CASES[name], SEMANTICS, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_MODELS)
def test_two_ranks_train_every_model_as_one_process(name: str, two_ranks: Pool) -> None:
    found = two_ranks.run(train, work_of(name, SEMANTICS, hw=None), timeout_s=400)
    check_semantics(runs_of(found), train_large(CASES[name], SEMANTICS, 2))


@pytest.mark.slow
def test_batch_norms_on_four_ranks(four_ranks: Pool) -> None:
    runs = runs_of(four_ranks.run(train, Work("resnet", SEMANTICS, hw=None), timeout_s=400))
    wanted, buffers = train_averaged(CASES["resnet"], SEMANTICS, 4)
    check_semantics(runs, wanted)
    check_buffers(runs, buffers)
