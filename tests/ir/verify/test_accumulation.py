"""The verifier on plans with micro-batches: against the oracle of interleavings, and on what loses a contribution."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import reference
from interleave import find_wrong
from schedules import chain, op, param, planned, program_named, schedule, target

from chunkc.errors import PlanError
from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan, Program
from chunkc.ir.verify import verify
from chunkc.ir.verify.verifier import ACCUMULATING, DEFERRING
from chunkc.passes import PlanOptions

HOST = PlanOptions(chunk_numel=64, os_home="host", accumulate=3)
SHARED = schedule(
    [param("a", 20), param("b", 20), param("c", 64), param("d", 64), param("e", 64)],
    [op([0]), op([1]), op([2]), op([3]), op([4])],
    [op([1], [1]), op([4], [4]), op([3], [3]), op([2], [2]), op([0], [0])],
)
"""The first chunk holds two parameters, between whose landings others land."""
DEFERRED = ("forward_again", "backward_unreduced", "accumulate_unreduced", "accumulate_last", "reduce_all")
TWINS = {"backward": "accumulate", "step": "restore"}
PLANS: dict[str, Plan] = {
    "two slots": planned(chain(3), target(), replace(HOST, max_slots=2)).plan,
    "three slots": planned(chain(4), target(), replace(HOST, max_slots=3)).plan,
    "states anywhere": planned(chain(4), target(), replace(HOST, num_resident_states=1, streamed_share=0.6)).plan,
    "measured": planned(chain(4), target(), replace(HOST, max_slots=3, tracks_grad_norm=True)).plan,
    "measured, states anywhere": planned(
        chain(4), target(), replace(HOST, num_resident_states=1, streamed_share=0.6, tracks_grad_norm=True)
    ).plan,
    "resident": planned(chain(3), target(), replace(HOST, os_home="device")).plan,
    "two ranks": planned(chain(4), target(world_size=2), replace(HOST, max_slots=4)).plan,
    "three ranks, padding": planned(chain(4), target(world_size=3, rank=1), replace(HOST, max_slots=6)).plan,
    "two ranks, measured": planned(chain(4), target(world_size=2, rank=1), replace(HOST, tracks_grad_norm=True)).plan,
    "two ranks, resident": planned(chain(4), target(world_size=2, rank=1), replace(HOST, os_home="device")).plan,
    "three ranks, resident, padding": planned(
        chain(4), target(world_size=3, rank=1), replace(HOST, os_home="device")
    ).plan,
    "two ranks, resident, measured": planned(
        chain(4), target(world_size=2, rank=1), replace(HOST, os_home="device", tracks_grad_norm=True)
    ).plan,
    "two ranks, a group that comes twice": planned(SHARED, target(world_size=2), replace(HOST, max_slots=4)).plan,
    "shared chunks": planned(
        schedule(
            [param("a", 40), param("b", 150), param("c", 20)],
            [op([0]), op([1]), op([2])],
            [op([2], [0]), op([1]), op([0], [2]), op([], [1])],
        ),
        target(),
        replace(HOST, max_slots=5),
    ).plan,
}


def changed(plan: Plan, program: str, position: int, action: Action) -> Plan:
    def edit(found: Program) -> Program:
        if found.name not in (program, TWINS.get(program)):
            return found
        new = action if found.name == program else replace(found.actions[position], waits=action.waits)
        return replace(found, actions=(*found.actions[:position], new, *found.actions[position + 1 :]))

    return replace(plan, programs=tuple(map(edit, plan.programs)))


def sequence_of(plan: Plan) -> str:
    return reference.ACCUMULATING + (reference.DEFERRING if plan.defers_reduction else "")


def is_accepted(plan: Plan) -> bool:
    try:
        verify(plan)
    except PlanError:
        return False
    return True


def test_every_legal_pair_of_programs_is_replayed() -> None:
    backwards = {b + after for b in "BC" for after in "FUSR"}
    ends = {end + after for end in "SRA" for after in "FU"}
    accumulating, deferring = ({"".join(p) for p in pairwise(letters)} for letters in (ACCUMULATING, DEFERRING))
    assert accumulating >= backwards | ends | {"FB", "FC", "FA", "UB", "UC", "AS"}
    reduced = {reduced + after for reduced in "LX" for after in "FUSR"}
    unreduced = {before + after for before in "PGQ" for after in "GQLX"}
    assert deferring >= accumulating | reduced | unreduced | {"FP", "UP"}


def test_micro_batches_defer_exchanges_where_all_chunks_have_slots() -> None:
    deferring = {name for name, plan in PLANS.items() if plan.defers_reduction}
    assert deferring == {name for name in PLANS if "ranks, resident" in name}


@pytest.mark.long(but="measured, states anywhere")
@pytest.mark.parametrize("name", PLANS)
def test_right_plans_compute_the_reference_in_every_interleaving(name: str) -> None:
    verify(PLANS[name])
    assert find_wrong(PLANS[name], range(20), sequence_of(PLANS[name])) == []


STRIDES = [3, pytest.param(1, marks=pytest.mark.slow)]
"""Every third wait is left out in a quick run."""


def waits_of(plan: Plan, programs: Sequence[str]) -> Iterator[tuple[str, int, Action, str]]:
    for program in programs:
        for position, action in enumerate(program_named(plan, program).actions):
            for wait in action.waits:
                yield program, position, action, wait


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", PLANS)
def test_no_plan_without_a_wait_is_accepted_that_can_go_wrong(name: str, stride: int) -> None:
    """Of the waits that can be spared, some only another order of programs needs."""
    num_refused, programs = 0, ("forward", "backward", "step")
    waits = list(waits_of(PLANS[name], programs))[::stride]
    for program, position, action, wait in waits:
        less = replace(action, waits=tuple(w for w in action.waits if w != wait))
        plan = changed(PLANS[name], program, position, less)
        if is_accepted(plan):
            assert find_wrong(plan, range(12), sequence_of(plan)) == [], f"{program} {position} without {wait}"
        else:
            num_refused += 1
    assert num_refused >= len(waits) / 2


@pytest.mark.long
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.defers_reduction])
def test_no_deferring_program_without_a_wait_is_accepted_that_can_go_wrong(name: str, stride: int) -> None:
    """Their waits are those of the programs that they stand for; with less to wait for, most can be spared."""
    refused = set[str]()
    for program, position, action, wait in islice(waits_of(PLANS[name], DEFERRED), None, None, stride):
        less = replace(action, waits=tuple(w for w in action.waits if w != wait))
        plan = changed(PLANS[name], program, position, less)
        if is_accepted(plan):
            assert find_wrong(plan, range(4), reference.DEFERRING) == [], f"{program} {position} without {wait}"
        else:
            refused.add(program)
    assert refused
    assert stride > 1 or refused >= {"backward_unreduced", "accumulate_last"}


def test_the_wait_that_orders_a_fetch_after_the_gradients_of_the_backward_before_is_needed() -> None:
    """Only the forward in between can be told to wait for copies of a backward."""
    plan = planned(chain(3), target(), HOST).plan
    last = max(i for i, a in enumerate(plan.program("backward").actions) if a.op is Op.EVICT)
    found = [(i, a) for i, a in enumerate(plan.program("forward").actions) if f"b{last}" in a.waits]
    assert any(a.op is Op.RUN for _, a in found)
    for position, action in found:
        plan = changed(plan, "forward", position, replace(action, waits=tuple(w for w in action.waits if w[0] != "b")))
    with pytest.raises(PlanError, match="a wait is missing"):
        verify(plan)
    assert find_wrong(plan, range(60), reference.ACCUMULATING)


def edited(plan: Plan, program: str, position: int, op: Op) -> Plan:
    def edit(found: Program) -> Program:
        if found.name != program:
            return found
        action = found.actions[position]
        source = action.source if op in (Op.STASH, Op.ADD) else None
        new = replace(action, op=op, source=source, stream=action.stream)
        return replace(found, actions=(*found.actions[:position], new, *found.actions[position + 1 :]))

    return replace(plan, programs=tuple(map(edit, plan.programs)))


def first(plan: Plan, program: str, op: Op) -> int:
    return next(i for i, a in enumerate(program_named(plan, program).actions) if a.op is op)


def test_a_later_micro_batch_that_overwrites_is_refused() -> None:
    plan = PLANS["two slots"]
    broken = edited(plan, "accumulate", first(plan, "accumulate", Op.ADD), Op.STASH)
    with pytest.raises(PlanError, match=r"accumulate b\d+ `stash c\d"):
        verify(broken)


def test_gradients_dropped_in_place_of_evicted_are_refused() -> None:
    plan = PLANS["two slots"]
    at = first(plan, "backward", Op.EVICT)
    action = plan.program("backward").actions[at]
    dropped = Action(
        Op.DROP, action.target, plan.program("backward").actions[at - 1].stream, action.slot, None, action.waits
    )
    for program in ("backward", "accumulate"):
        programs = (
            replace(p, actions=(*p.actions[:at], dropped, *p.actions[at + 1 :])) if p.name == program else p
            for p in plan.programs
        )
        plan = replace(plan, programs=tuple(programs))
    with pytest.raises(PlanError, match="only newest copy"):
        verify(plan)


def test_a_chunk_opened_again_in_one_backward_is_refused() -> None:
    """A gradient chunk that comes twice: what landed before is fetched the second time."""
    shared = schedule([param("a", 30), param("b", 30), param("c", 100)], [op([0]), op([1]), op([2])],
                      [op([1], [1]), op([2], [2]), op([0], [0])])  # fmt: skip
    plan = planned(shared, target(), replace(HOST, chunk_numel=128, max_slots=2)).plan
    beside = plan.layout.grad_chunks()[plan.layout.placements[0].chunk]
    backward = plan.program("backward").actions
    again = [i for i, a in enumerate(backward) if a.target == f"c{beside}" and a.op in (Op.OPEN, Op.FETCH)]
    assert [backward[i].op for i in again] == [Op.OPEN, Op.FETCH]
    with pytest.raises(PlanError, match=r"`open c\d.*which would be lost"):
        verify(edited(plan, "backward", again[1], Op.OPEN))


def rewritten(plan: Plan, at: int, *actions: Action) -> Plan:
    def edit(found: Program) -> Program:
        if found.role != "backward":
            return found
        new = [replace(a, op=Op.ADD) if a.op is Op.STASH and found.name == "accumulate" else a for a in actions]
        return replace(found, actions=(*found.actions[:at], *new, *found.actions[at + len(new) :]))

    return replace(plan, programs=tuple(map(edit, plan.programs)))


class TestSeveralRanks:
    """Mutants of a plan of rank 0 of two, in which a group comes, is added to, reduced, released and copied home."""

    plan = PLANS["two ranks"]
    backward = plan.program("backward").actions
    at = first(plan, "backward", Op.REDUCE)

    def refused(self, plan: Plan, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            verify(plan)
        assert find_wrong(plan, range(20), reference.ACCUMULATING)

    def test_the_plan_opens_what_is_remote_and_fetches_what_is_its_own(self) -> None:
        layout = self.plan.layout
        for name, own in (("backward", Op.OPEN), ("accumulate", Op.FETCH)):
            entered = [a for a in program_named(self.plan, name).actions if a.op in (Op.OPEN, Op.FETCH)]
            grads = [a for a in entered if layout.chunks[a.index].list is ChunkList.GRAD]
            assert {a.op for a in grads if layout.owner(a.index) == 0} == {own}
            assert {a.op for a in grads if layout.owner(a.index) == 1} == {Op.OPEN}
            gathered = {c for a in program_named(self.plan, name).actions if a.op is Op.GATHER for c in
                        layout.groups[a.index].chunks}  # fmt: skip
            assert not gathered & {a.index for a in grads}

    def test_released_before_the_reduction(self) -> None:
        reduce, release = self.backward[self.at : self.at + 2]
        mutant = rewritten(self.plan, self.at, replace(release, waits=reduce.waits), replace(reduce, waits=()))
        self.refused(mutant, r"`release g\d.*gradients of 1 parameters that are not reduced")

    def test_reduced_twice(self) -> None:
        reduce = self.backward[self.at]
        mutant = rewritten(self.plan, self.at, reduce, replace(reduce, waits=()))
        with pytest.raises(PlanError, match=r"`reduce g\d.*(reduced twice|nothing has landed)"):
            verify(mutant)

    def test_reduced_before_anything_landed(self) -> None:
        run, *landings, reduce = self.backward[self.at - 3 : self.at + 1]
        assert run.op is Op.RUN and {a.op for a in landings} == {Op.STASH}
        moved = [replace(a, waits=()) for a in (reduce, run, *landings)]
        with pytest.raises(PlanError, match=r"`reduce g\d.*nothing has landed in its chunks"):
            verify(rewritten(self.plan, self.at - 3, *moved))

    @pytest.mark.parametrize("op", [Op.FETCH, Op.EVICT, Op.DROP])
    def test_a_remote_gradient_chunk_has_no_home(self, op: Op) -> None:
        at = next(i for i, a in enumerate(self.backward) if a.op is Op.OPEN and self.plan.layout.owner(a.index) == 1)
        opened = self.backward[at]
        if op is Op.FETCH:
            mutant = rewritten(self.plan, at, replace(opened, op=op))
        else:
            release = self.backward[self.at + 1]
            stream = Stream.D2H if op is Op.EVICT else release.stream
            mutant = rewritten(
                self.plan, self.at + 1, Action(op, opened.target, stream, opened.slot, None, release.waits)
            )
        with pytest.raises(PlanError, match=rf"`{op} c\d+.*belongs to rank 1, this is rank 0"):
            verify(mutant)

    def test_a_sum_opened_again_by_a_later_micro_batch(self) -> None:
        at = next(i for i, a in enumerate(self.plan.program("backward", "later").actions)
                  if a.op is Op.FETCH and self.plan.layout.chunks[a.index].list is ChunkList.GRAD)  # fmt: skip
        with pytest.raises(PlanError, match=r"accumulate b\d+ `open c\d.* does not match `open"):
            verify(edited(self.plan, "accumulate", at, Op.OPEN))

    def test_a_group_that_comes_twice_is_reduced_twice(self) -> None:
        plan = PLANS["two ranks, a group that comes twice"]
        reduced = [a.index for a in plan.program("backward").actions if a.op is Op.REDUCE]
        assert max(map(reduced.count, reduced)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 0}, "one micro-batch or more"),
        ({"accumulate": 1}, "a plan has the programs forward, backward, step"),
    ],
)
def test_programs_and_number_of_micro_batches_agree(change: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify(replace(PLANS["resident"], **change))


def test_labels_of_an_iteration_are_its_own() -> None:
    plan = PLANS["two slots"]
    found = [(program.name, label) for program, label, _ in plan.labelled()]
    assert len({label for _, label in found}) == len(found)
    names = ("forward", "backward", "forward", "accumulate", "forward", "accumulate", "step")
    assert tuple(p.name for p in plan.iteration()) == names
    assert found[0] == ("forward", "f0") and ("accumulate", "3:b0") in found and found[-1][1].startswith("s")
