"""Proof of a plan: static checks, a replay in program order, and a race detector over the streams.

The verifier knows no pass.

    structure                  all that needs no replay
    replay, moves, training    in program order every action is right: contents, places, budgets
    happens_before             every access is ordered after those that it conflicts with
    states                     the state changes of all payloads, derived in another way

Without races every legal interleaving of the streams equals program order, so the replay proves all of them.

Programs do not join when they end: copies of the next forward may run while the step still updates. The sequence that
is replayed contains every legal pair of programs after every legal predecessor, and the cycle more than twice. A wait
for a label that no program of its letter has had since the first micro-batch of a step counts as satisfied. A
transition joins all streams at its end: what follows it runs as from a cold start. ``resume``, ``reduce_all`` and an
evaluation also begin so. Where updates begin before their step, the sequence is replayed a second time without that.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkc.errors import PlanError
from chunkc.ir.actions import Op
from chunkc.ir.plan import TRANSITIONS, Key, Plan, Program
from chunkc.ir.verify.happens_before import HappensBefore
from chunkc.ir.verify.replay import Facts, Machine
from chunkc.ir.verify.states import payload_states
from chunkc.ir.verify.structure import check_structure
from chunkc.ir.verify.training import EFFECTS, begin, finish

_PROGRAMS: dict[str, Key] = {
    "F": ("forward", "first", True),
    "G": ("forward", "later", False),
    "B": ("backward", "first", True),
    "C": ("backward", "later", True),
    "P": ("backward", "first", False),
    "Q": ("backward", "later", False),
    "L": ("backward", "last", True),
    "S": ("step", "first", True),
    "R": ("restore", "first", True),
    "A": ("abandon", "first", True),
    "U": ("resume", "first", True),
    "X": ("reduce_all", "first", True),
    "E": ("evaluate", "first", True),
}
SEQUENCE = "FA FBS FBS FBR FBR FBS FA FBR UBR FA UBS UBS FA F".replace(" ", "")
"""Every legal pair of programs after each legal predecessor, from a cold start."""
ACCUMULATING = "FA FBS FBS FBR FBFCS FBFCFCS FBFCR FBFA UCS UBS UBFCR UBUCS FCUCR FBFBS FBFCUBS FBUCFA FBFAS F".replace(
    " ", ""
)
"""The same where micro-batches add to gradients: ``C`` is the backward of any but the first of a step."""
DEFERRING = ACCUMULATING + (
    "PGLS FPGQGQGLS FPGLR FPGQLFCS FPXS FPXR FPXFCS FPXUCR FPGXS FPGQXFBS FPGGQLUCS FPQXUCS FPLFBS FPLS FPQGLR "
    "FPGGQQLFPLS FAUPGLS UPXS FPGLUPLS F"
).replace(" ", "")
"""The same where micro-batches can do without exchanges, behind all of that: ``P``, ``Q`` and ``L`` are their backwards
(a first one, later ones, the last), ``G`` their forward, ``X`` reduces before something else."""
EVALUATIONS = "EEE"
"""The same for a plan of an evaluation."""


def verify(plan: Plan) -> None:
    """Prove that ``plan`` is safe in every interleaving of its streams.

    Time is linear in the actions of the sequence, times parameters per action: 36 programs, 77 where micro-batches add
    up, 200 where they defer exchanges.

    Raises:
        PlanError: names the action (label and text), the chunk, the moment (program and segment) and the numbers.
    """
    check_structure(plan)
    facts = Facts(plan)
    sequence = replayed_programs(plan)
    _replay_all(facts, sequence)
    alone = tuple(program.without_begins() for program in sequence)
    if any(program is not shorter for program, shorter in zip(sequence, alone, strict=True)):
        _replay_all(facts, alone)
    if plan.is_evaluation:
        payload_states(plan, sequence[:2])
    else:
        states = "FBFCSFBRFAUBFCFBUCR" if facts.accumulates else "FBSFBRFAUBS"
        states += "FPGQGLSFPXFCS" if plan.defers_reduction else ""
        payload_states(plan, _programs(plan, states))


def verify_beside(evaluation: Plan, training: Plan) -> None:
    """Prove that two verified plans of one model may run by turns.

    An evaluation writes to no home and to no static resident, and both its ends are joined. So equal layouts and equal
    cold states suffice.

    Raises:
        PlanError: naming what differs.
    """
    if evaluation.layout != training.layout:
        raise PlanError("the evaluation was planned for another layout than the training programs")
    left, needed = (set(p.cold.resident) for p in (evaluation, training))
    if left != needed:
        differing = ", ".join(f"{target} in d{slot}" for target, slot in sorted(left ^ needed))
        raise PlanError(f"the cold states of evaluation and training differ: {differing}")


def _replay_all(facts: Facts, sequence: Sequence[Program]) -> None:
    moments = {id(p): _moments(p) for p in {id(p): p for p in sequence}.values()}
    machine, order = Machine(facts, sequence[0].entry), HappensBefore()
    for program in sequence:
        _replay(program, moments[id(program)], machine, order)


def _replay(program: Program, moments: tuple[str, ...], machine: Machine, order: HappensBefore) -> None:
    if program.role in ("resume", "reduce_all"):
        order.join()
    order.begin(program)
    begin(machine, program)
    for position, action in enumerate(program.actions):
        EFFECTS[action.op](machine, order.issue(program, position, moments[position]))
    left_undone = finish(machine, program)
    if left_undone is not None:
        raise PlanError(f"{program.name}, at its end: {left_undone}")
    _check_exit(program, machine)
    if program.role in TRANSITIONS or program.role == "evaluate":
        order.join()


def _check_exit(program: Program, machine: Machine) -> None:
    declared, resident = frozenset(program.exit.resident), machine.resident_pairs()
    if declared != resident:
        extra = ", ".join(f"{target} in d{slot}" for target, slot in sorted(resident - declared)) or "nothing"
        absent = ", ".join(f"{target} in d{slot}" for target, slot in sorted(declared - resident)) or "nothing"
        raise PlanError(
            f"{program.name}, at its end: the device holds {extra} beyond the declared exit state and lacks {absent}"
        )


def _moments(program: Program) -> tuple[str, ...]:
    """For every action, the boundary at which it stands: before the next segment, or after the last one."""
    names: list[str] = []
    moment = f"at the end of {program.name}"
    for action in reversed(program.actions):
        if action.op is Op.RUN:
            moment = f"before {action.target}"
        names.append(moment)
    return tuple(reversed(names))


def replayed_programs(plan: Plan) -> tuple[Program, ...]:
    """The programs of ``plan`` in the sequence in which the verifier replays them."""
    letters = EVALUATIONS if plan.is_evaluation else ACCUMULATING if plan.accumulate > 1 else SEQUENCE
    letters = DEFERRING if plan.defers_reduction else letters
    return _programs(plan, letters)


def _programs(plan: Plan, letters: str) -> tuple[Program, ...]:
    """The programs that ``letters`` name; updates begin in the last backward before each step."""
    alone = {p.key: p.without_begins() for p in plan.programs if p.role == "backward"}
    programs: list[Program] = []
    is_stepped = False
    for letter in reversed(letters):
        program = plan.program(*_PROGRAMS[letter])
        if program.role in ("step", "restore"):
            is_stepped = True
        elif program.role == "backward":
            program, is_stepped = program if is_stepped else alone[program.key], False
        programs.append(program)
    return tuple(reversed(programs))
