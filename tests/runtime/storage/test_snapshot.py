"""Snapshots: what is read is the moment of the call, whoever writes when; the copies aside stay within their bound."""

import threading

import pytest
import torch
from awaiting import await_that
from hypothesis import given
from hypothesis import strategies as st
from layouts import layout_of, values_of

from chunkc.errors import ChunkcError
from chunkc.runtime.storage.snapshot import Snapshot
from chunkc.runtime.storage.staging import StagingStore

NUM_CHUNKS = 6
NUMEL = 16
CHUNK_NBYTES = 2 * NUMEL * 4


class Chunks:
    def __init__(self, max_copied_nbytes: int) -> None:
        self.tensors = [(torch.full((NUMEL,), float(i)), torch.full((NUMEL,), i + 0.5)) for i in range(NUM_CHUNKS)]
        self.snapshot = Snapshot(self.tensors.__getitem__, range(NUM_CHUNKS), max_copied_nbytes)

    def write(self, chunk: int) -> None:
        self.snapshot.before_write(chunk)
        for tensor in self.tensors[chunk]:
            tensor.fill_(-1.0)

    def check(self, chunk: int) -> None:
        first, second = self.snapshot.take(chunk)
        assert torch.equal(first, torch.full((NUMEL,), float(chunk)))
        assert torch.equal(second, torch.full((NUMEL,), chunk + 0.5))
        first.fill_(7.0)
        assert not (self.tensors[chunk][0] == 7.0).any(), "what is taken belongs to the reader"


@given(st.permutations([*range(NUM_CHUNKS), *range(-NUM_CHUNKS, 0)]))
def test_every_order_of_reads_and_writes_reads_the_moment_of_the_call(order: list[int]) -> None:
    """A number below zero writes chunk ``-1 - number``, each other reads one."""
    chunks = Chunks(NUM_CHUNKS * CHUNK_NBYTES)
    for number in order:
        if number < 0:
            chunks.write(-1 - number)
            chunks.write(-1 - number)
        else:
            chunks.check(number)
    written_first = sum(order.index(-1 - chunk) < order.index(chunk) for chunk in range(NUM_CHUNKS))
    assert chunks.snapshot.num_copies == written_first, "only what is written before it is read is copied"
    assert chunks.snapshot.num_waits == 0


@pytest.mark.parametrize("bound", [0, CHUNK_NBYTES - 1, CHUNK_NBYTES, 3 * CHUNK_NBYTES])
def test_a_writer_without_room_waits_for_the_reader(bound: int) -> None:
    chunks = Chunks(bound)
    writer = threading.Thread(target=lambda: [chunks.write(chunk) for chunk in range(NUM_CHUNKS)])
    writer.start()
    num_free = bound // CHUNK_NBYTES
    for chunk in range(NUM_CHUNKS):
        if chunk + num_free < NUM_CHUNKS:
            await_that(lambda chunk=chunk: chunks.snapshot.num_waits == chunk + 1)  # type: ignore[misc]
            assert writer.is_alive()
        else:
            writer.join(60)
            assert not writer.is_alive()
        chunks.check(chunk)
    writer.join(60)
    assert not writer.is_alive()
    assert chunks.snapshot.num_waits == NUM_CHUNKS - bound // CHUNK_NBYTES


def test_closing_lets_waiting_writers_go() -> None:
    chunks = Chunks(0)
    writer = threading.Thread(target=chunks.write, args=(3,))
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    chunks.snapshot.close()
    writer.join(60)
    assert not writer.is_alive() and (chunks.tensors[3][0] == -1.0).all()
    with pytest.raises(ChunkcError, match="given up before all of it was read"):
        chunks.snapshot.take(3)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_parameters_are_read_as_they_were(dtype: str, on_device: bool) -> None:
    """Also those of several chunks, of no element, and without a state; only what is written again is copied aside."""
    shapes = [(13, 7), (1,), (0, 3), (200,), (3, 50), ()]
    values = values_of(layout_of(shapes, dtype, on_device=on_device))
    before = [torch.randn(shape) for shape in shapes]
    values.load(StagingStore([v.clone() for v in before]))
    for index, value in enumerate(before):
        values.write_states(index, {"exp_avg": value + 1, "exp_avg_sq": value + 2})
    reader = values.snapshot(range(len(shapes)), 1 << 20)
    for index, value in enumerate(before):
        values.write_param(index, value - 5, payload=True)
        values.write_states(index, {"exp_avg": value - 6, "exp_avg_sq": value - 7})
    for index, value in enumerate(before):
        found = [reader.read(index, position) for position in range(3)]
        assert [len(flats) for flats in found] == [value.numel() > 0] * 3, "one run of elements, where there are any"
        for flats, wanted in zip(found, (value, value + 1, value + 2), strict=True):
            assert all(torch.equal(flat, wanted.view(-1)) for flat in flats), index
        assert torch.equal(values.read_param(index), value - 5), "the write itself is there"
    with pytest.raises(KeyError):
        reader.read(0)
    values.store.end_snapshot(reader.snapshot)
    values.write_param(0, before[0], payload=True)
    assert torch.equal(values.read_param(0), before[0])


def test_what_is_not_read_may_be_written_without_a_copy() -> None:
    """Two parameters in chunks of their own, of which one is read, and no room for copies."""
    values = values_of(layout_of([(256,), (256,)], "float32", on_device=False))
    before = [torch.randn(256) for _ in range(2)]
    values.load(StagingStore([v.clone() for v in before]))
    first, second = ({part.chunk for part in values.store.parts(index)} for index in range(2))
    assert first.isdisjoint(second)
    reader = values.snapshot([0], 0)
    values.write_param(1, before[1] - 5, payload=True)  # would wait for the reader
    assert reader.snapshot.num_copies == reader.snapshot.num_waits == 0
    assert torch.equal(reader.read(0)[0], before[0])
    with pytest.raises(KeyError):
        reader.read(1)
    values.store.end_snapshot(reader.snapshot)
