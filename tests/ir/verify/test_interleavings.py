"""The verifier against an oracle: symbolic execution of plans in many random legal interleavings.

Accepted plans compute the reference in all of them; each wait that is demanded is needed in one of them.
"""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from interleave import execute, find_wrong, lower
from plans import SPECS, chain
from reference import SEQUENCE
from spec import PlanSpec

from chunkc.errors import PlanError
from chunkc.ir.actions import FROM_SLOT, TO_SLOT, Action, Op, Stream, parse
from chunkc.ir.plan import Plan
from chunkc.ir.verify import verify

SEEDS = range(100)
ORACLE_SPECS = {**SPECS, "chain": chain(4)}


def accepted(plan: Plan) -> bool:
    try:
        verify(plan)
    except PlanError:
        return False
    return True


@pytest.mark.long(but="measured")
@pytest.mark.parametrize("name", ORACLE_SPECS)
def test_right_plans_compute_the_reference_in_every_interleaving(name: str) -> None:
    plan = ORACLE_SPECS[name].build()
    assert accepted(plan)
    assert find_wrong(plan, SEEDS) == []


def _all_waits() -> list[tuple[str, str, int, str]]:
    return [
        (name, program, position, wait)
        for name, spec in ORACLE_SPECS.items()
        for program, texts in spec.programs.items()
        for position in range(len(texts))
        for wait in spec.action(program, position).waits
    ]


@pytest.mark.long(but="measured_begun")
@pytest.mark.parametrize("name", ORACLE_SPECS)
def test_deleting_a_wait_is_refused_exactly_when_some_interleaving_goes_wrong(name: str) -> None:
    for spec_name, program, position, wait in _all_waits():
        if spec_name != name:
            continue
        plan = ORACLE_SPECS[name].without_wait(program, position, wait).build()
        is_accepted = accepted(plan)
        wrong = find_wrong(plan, range(40) if is_accepted else SEEDS)
        assert is_accepted == (not wrong), f"{program} {position} without {wait}: {wrong}"


def test_some_deleted_waits_are_redundant_and_most_are_not() -> None:
    kept = [ORACLE_SPECS[n].without_wait(p, k, w).build() for n, p, k, w in _all_waits()]
    num_accepted = sum(map(accepted, kept))
    assert 3 <= num_accepted <= len(kept) // 4


@pytest.mark.parametrize("name", ORACLE_SPECS)
def test_deleting_an_action_is_refused(name: str) -> None:
    spec = ORACLE_SPECS[name]
    for program, texts in spec.programs.items():
        for position, text in enumerate(texts):
            if text.startswith("begin"):
                continue  # the step computes it
            assert not accepted(spec.delete(program, position).build()), f"{program} without `{text}`"


SLOTLESS = TO_SLOT | FROM_SLOT


def _edit(spec: PlanSpec, chance: random.Random) -> PlanSpec:
    program = chance.choice([name for name, texts in spec.programs.items() if texts])
    texts = spec.programs[program]
    position = chance.randrange(len(texts))
    action = parse(texts[position])
    kind = chance.choice(("delete", "move", "wait", "wait", "other wait", "slot", "target", "stream", "insert"))
    if kind == "delete":
        return spec.delete(program, position)
    if kind == "move":
        return spec.move(program, position, chance.randrange(len(texts)))
    if kind == "insert":
        return spec.insert(program, chance.randrange(len(texts) + 1), str(replace(action, waits=())))
    return spec.set(program, position, str(_changed(action, kind, spec, chance)))


def _changed(action: Action, kind: str, spec: PlanSpec, chance: random.Random) -> Action:
    if kind == "wait" and action.waits:
        return replace(action, waits=tuple(w for w in action.waits if w != chance.choice(action.waits)))
    if kind == "other wait":
        letter, program = chance.choice((("f", "forward"), ("b", "backward"), ("s", "step")))
        other = f"{letter}{chance.randrange(1 + len(spec.programs[program]))}"
        return replace(action, waits=(*action.waits[1:], other))
    if kind == "slot" and action.slot is not None:
        return replace(action, slot=chance.randrange(len(spec.slots)))
    if kind == "target" and action.target[:1] in ("c", "o"):
        letters = action.target.rstrip("0123456789")
        return replace(action, target=f"{letters}{chance.randrange(len(spec.chunks))}")
    if kind == "stream" and action.op in (Op.UPDATE, Op.RESTORE):
        return replace(action, stream=Stream.COMPUTE if action.stream is Stream.CPU else Stream.CPU)
    return action


@pytest.mark.long
@given(st.sampled_from(sorted(ORACLE_SPECS)), st.integers(1, 3), st.randoms(use_true_random=False))
def test_whatever_is_accepted_computes_the_reference(name: str, num_edits: int, chance: random.Random) -> None:
    spec = ORACLE_SPECS[name]
    for _ in range(num_edits):
        spec = _edit(spec, chance)
    try:
        plan = spec.build()
    except ValueError:
        return  # an edit that is no action
    if not accepted(plan):
        event("refused")
        return
    event("accepted")
    assert find_wrong(plan, range(40)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLE_SPECS)
def test_thousands_of_random_edits(name: str) -> None:
    num_accepted = 0
    for seed in range(1000):
        chance = random.Random(seed)
        spec = ORACLE_SPECS[name]
        for _ in range(chance.randint(1, 3)):
            spec = _edit(spec, chance)
        plan = spec.build()
        if accepted(plan):
            num_accepted += 1
            assert find_wrong(plan, range(20)) == [], f"seed {seed}"
    assert num_accepted > 50


class TestOracle:
    def test_interleavings_differ(self) -> None:
        """A race that needs a slow copy is not shown by every seed, but by some."""
        plan = ORACLE_SPECS["evicting"].without_wait("forward", 5, "f4").build()
        shown = [bool(find_wrong(plan, [seed], "FBSFBS")) for seed in range(40)]
        assert any(shown) and not all(shown)

    def test_wrong_in_program_order_is_always_shown(self) -> None:
        plan = ORACLE_SPECS["evicting"].set("backward", 2, "drop c2 <- d0 @compute").build()
        assert all(find_wrong(plan, [seed], "FBS") for seed in range(20))

    def test_overlapping_slots_tear_each_other(self) -> None:
        slots = ((0, 256), (128, 256))
        plan = ORACLE_SPECS["evicting"].but(slots=slots).build()
        assert all(find_wrong(plan, [seed], "FBS") for seed in range(20))

    def test_restore_is_told_apart_from_update(self) -> None:
        spec = ORACLE_SPECS["evicting"]
        plan = spec.but(programs={**spec.programs, "restore": spec.programs["step"]}).build()
        assert find_wrong(plan, [0], "FBRFBS")

    def test_skipped_update_is_shown(self) -> None:
        assert find_wrong(ORACLE_SPECS["evicting"].delete("step", 2).build(), [0], "FBS")

    def test_sequence_covers_what_a_run_can_do(self) -> None:
        assert {a + b for a, b in itertools.pairwise(SEQUENCE)} == {
            "FB",
            "BS",
            "BR",
            "SF",
            "RF",
            "FA",
            "AF",
            "AU",
            "SU",
            "RU",
            "UB",
        }
        assert SEQUENCE.endswith("S")

    def test_a_wait_for_each_other_is_a_deadlock(self) -> None:
        lowered = lower(ORACLE_SPECS["evicting"].build(), "FBS")
        lowered.tasks[0].waits.append(1)
        assert execute(lowered, 0) == ["deadlock"]
