"""Exchanges of a plan (``gather``, ``reduce``, ``sum``) as functions over the memory of the chunks.

A group is one tensor in the arena, of which this rank's chunk is a part: both collectives work in place. What a rank
receives is counted as the plan counts it: the chunks of the others, and what a mean over replicas takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from chunkc.distributed.process_group import Ranks
from chunkc.ir.actions import Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan
from chunkc.runtime.devices.protocol import Work
from chunkc.runtime.execution.bound_action import RunEnvironment, in_sequence
from chunkc.runtime.execution.grad_norm import GradNormTable
from chunkc.runtime.storage.chunk_store import ChunkStore


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
        gather = partial(self.ranks.gather, group_memory, own_chunk, self._describe(text))
        return in_sequence(gather, self._counting(group_memory.nbytes - own_chunk.nbytes))

    def reduce(self, group: int, first_slot: int, text: str) -> Work:
        """Put the mean of the own chunk over all ranks into that chunk: a sum of shares that landed divided."""
        group_memory, own_chunk = self._parts(group, first_slot)
        layout = self.plan.layout
        count = self._counting(group_memory.nbytes - own_chunk.nbytes + layout.mirrored_nbytes(own_chunk.nbytes))
        kind = layout.chunks[layout.groups[group].first_chunk].list
        mean = not (kind is ChunkList.GRAD and self.plan.accumulate > 1)
        reduce = partial(self.ranks.reduce, own_chunk, group_memory, self._describe(text), mean=mean)
        return in_sequence(reduce, count)

    def sum(self, norm_table: GradNormTable, text: str) -> Work:
        """Add up over all ranks the findings of this rank's norms."""
        return in_sequence(norm_table.total, partial(self.ranks.total, norm_table.totals, self._describe(text)))

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
