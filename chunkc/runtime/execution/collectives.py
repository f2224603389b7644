"""Exchanges of a plan (``gather``, ``reduce``, ``sum``) as functions over the memory of the chunks.

A group is one tensor in the arena, of which this rank's chunk is a part: both collectives work in place. What a rank
receives is counted as the plan counts it: the chunks of the others, and what a mean over replicas takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chunkc.distributed.process_group import Ranks
from chunkc.ir.actions import Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan
from chunkc.runtime.execution.bound_action import RunEnvironment
from chunkc.runtime.execution.grad_norm import GradNormTable
from chunkc.runtime.storage.chunk_store import ChunkStore

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Exchanges of one program."""

    plan: Plan
    store: ChunkStore
    ranks: Ranks
    env: RunEnvironment
    program: str

    def gather(self, group: int, first_slot: int, text: str) -> Work:
        """Fill the slots of a group from its owners."""
        group_memory, own_chunk = self._parts(group, first_slot)
        description, ranks = self._describe(text), self.ranks
        count = self._counting(group_memory.nbytes - own_chunk.nbytes)

        def gather() -> None:
            ranks.gather(group_memory, own_chunk, description)
            count()

        return gather

    def reduce(self, group: int, first_slot: int, text: str) -> Work:
        """Put the mean of the own chunk over all ranks into that chunk: a sum of shares that landed divided."""
        group_memory, own_chunk = self._parts(group, first_slot)
        description, layout = self._describe(text), self.plan.layout
        count = self._counting(group_memory.nbytes - own_chunk.nbytes + layout.mirrored_nbytes(own_chunk.nbytes))
        kind = layout.chunks[layout.groups[group].first_chunk].list
        exchange = self.ranks.add_up if kind is ChunkList.GRAD and self.plan.accumulate > 1 else self.ranks.average

        def reduce() -> None:
            exchange(own_chunk, group_memory, description)
            count()

        return reduce

    def sum(self, norm_table: GradNormTable, text: str) -> Work:
        """Add up over all ranks the findings of this rank's norms."""
        description, ranks = self._describe(text), self.ranks

        def add_up() -> None:
            norm_table.total()
            ranks.total(norm_table.totals, description)

        return add_up

    def _parts(self, group: int, first_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunks of a group, and the own one of them."""
        group_memory, layout = self.store.group_in_slots(group, first_slot), self.plan.layout
        return group_memory, group_memory.chunk(layout.world_size)[layout.rank]

    def _counting(self, received_nbytes: int) -> Work:
        moved, key = self.env.moved_nbytes, (self.program, Stream.COMM)

        def count() -> None:
            moved[key] = moved.get(key, 0) + received_nbytes

        return count

    def _describe(self, text: str) -> str:
        return f"`{text}` of {self.program}"
