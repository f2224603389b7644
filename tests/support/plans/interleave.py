"""Random legal interleavings of plans over symbolic memory, at changing speeds: the oracle of the verifier's tests."""

import random
from collections.abc import Sequence
from dataclasses import replace

from reference import SEQUENCE, Content, Model
from symbolic import GARBAGE, STREAMS, Lowered, Memory, Started, Task

from chunkc.ir.plan import Plan
from chunkc.ir.tiers import Tier


def lower(plan: Plan, sequence: str = SEQUENCE) -> Lowered:
    """The tasks of ``sequence``; reusable for any number of interleavings."""
    return Lowered(Model(plan), sequence)


def execute(lowered: Lowered, seed: int) -> list[str]:
    """Carry out one random legal interleaving; what differs from the reference (empty: nothing)."""
    chance, memory = random.Random(seed), Memory(lowered.plan)
    lowered.wrong.clear()
    lowered.initial(memory)
    queues: list[list[int]] = [[n for n, t in enumerate(lowered.tasks) if t.stream == s] for s in range(len(STREAMS))]
    heads, running = [0] * len(STREAMS), dict[int, Started]()
    done: set[int] = set()
    weights = [1.0] * len(STREAMS)
    while len(done) < len(lowered.tasks):
        if chance.random() < 0.05:
            weights = [10 ** chance.uniform(-2, 2) for _ in STREAMS]
        ready = [
            s
            for s, queue in enumerate(queues)
            if s in running or (heads[s] < len(queue) and all(w in done for w in lowered.tasks[queue[heads[s]]].waits))
        ]
        if not ready:
            return ["deadlock"]
        stream = chance.choices(ready, [weights[s] for s in ready])[0]
        number = queues[stream][heads[stream]]
        if stream not in running:
            running[stream] = _start(memory, lowered.tasks[number])
        else:
            _finish(memory, lowered.tasks[number], *running.pop(stream))
            done.add(number)
            heads[stream] += 1
    return lowered.wrong + _final(lowered, memory)


def _start(memory: Memory, task: Task) -> Started:
    inputs = [memory.read(place) for place in task.reads]
    before = [memory.stamps(place) for place in task.reads if place not in task.writes]
    for place in task.writes:
        memory.write(place, GARBAGE)
    return inputs, before, [memory.stamps(place) for place in task.writes]


def _finish(
    memory: Memory, task: Task, inputs: list[Content], before: list[list[int]], marked: list[list[int]]
) -> None:
    pure = [place for place in task.reads if place not in task.writes]
    changed = {place for place, stamps in zip(pure, before, strict=True) if memory.stamps(place) != stamps}
    torn = [memory.stamps(place) != stamps for place, stamps in zip(task.writes, marked, strict=True)]
    for place, is_torn in zip(task.writes, torn, strict=True):
        if is_torn:
            changed.add(place)
    seen = [GARBAGE if place in changed else held for place, held in zip(task.reads, inputs, strict=True)]
    for place, output, is_torn in zip(task.writes, task.work(seen), torn, strict=True):
        memory.write(place, GARBAGE if is_torn else output)


def _final(lowered: Lowered, memory: Memory) -> list[str]:
    """After a sequence that ends cold: parameters and triples at their homes against the reference."""
    wrong, slots = [], dict(lowered.plan.program("forward").entry.resident)
    for c in lowered.model.mine:
        chunk, triple = lowered.layout.chunks[c], lowered.expected.triples[c]
        payload_at = lowered.home("home", c) if chunk.home is Tier.HOST else ("slot", slots[f"c{c}"])
        triple_at = lowered.home("os", c) if chunk.os_home is Tier.HOST else ("slot", slots[f"os{c}"])
        if memory.read(payload_at) != lowered.model.cast(c, triple):
            wrong.append(f"c{c} ends with wrong parameters")
        if memory.read(triple_at) != (triple,):
            wrong.append(f"os{c} ends with a wrong triple")
    return wrong


def find_wrong(plan: Plan, seeds: Sequence[int], sequence: str = SEQUENCE) -> list[str]:
    """Differences from the reference in the first of ``seeds`` that shows any, with and without early updates."""
    alone = replace(plan, programs=tuple(program.without_begins() for program in plan.programs))
    for variant in (plan, *([alone] if alone != plan else [])):
        lowered = lower(variant, sequence)
        for seed in seeds:
            wrong = execute(lowered, seed)
            if wrong:
                return [f"seed {seed}: {w}" for w in wrong]
    return []
