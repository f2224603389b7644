"""Budgets, poison, settings and readings of the emulated device, and one copy pipeline under every debug setting."""

import gc
import itertools
import time
from collections.abc import Iterator

import pytest
import torch

from chunkc.errors import ChunkcError, HardwareError
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.protocol import Device, Event

KIB = 2**10
MIB = 2**20


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice("emulated-1m-4m", MIB, 4 * MIB)
    yield made
    made.close()


def test_it_is_a_device(device: EmulatedDevice) -> None:
    as_protocol: Device = device
    assert as_protocol.torch_device == torch.device("cpu")
    assert (as_protocol.device_budget_nbytes, as_protocol.host_budget_nbytes) == (MIB, 4 * MIB)
    names = [name for name in vars(Device) if not name.startswith("_")]
    assert all(hasattr(device, name) for name in [*names, *Device.__annotations__])


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", DebugSettings()),
        ("poison", DebugSettings(poison=True)),
        ("sync", DebugSettings(synchronous=True)),
        (" poison , delay=2.5,seed=3, ", DebugSettings(poison=True, max_delay_ms=2.5, seed=3)),
    ],
)
def test_settings_are_read_from_the_environment(text: str, settings: DebugSettings) -> None:
    assert DebugSettings.from_env(text) == settings


@pytest.mark.parametrize(
    "text", ["poisn", "delay", "delay=", "delay=fast", "delay=-1", "delay=inf", "delay=nan", "seed=1.5", "poison=1"]
)
def test_wrong_settings_are_refused(text: str) -> None:
    with pytest.raises(ChunkcError, match=text.partition("=")[0]):
        DebugSettings.from_env(text)


@pytest.mark.parametrize("budgets", [(0, 1), (1, 0), (-1, 1)])
def test_a_device_has_memory(budgets: tuple[int, int]) -> None:
    with pytest.raises(HardwareError, match=str(min(budgets))):
        EmulatedDevice("emulated", *budgets)


def test_reservations_are_exact(device: EmulatedDevice) -> None:
    device.reserve(MIB - 100)
    assert device.free_device_nbytes() == 100
    with pytest.raises(HardwareError, match=rf"emulated-1m-4m: 101 device bytes .* 100 of {MIB} are free"):
        device.reserve(101)
    device.reserve(100)
    assert device.free_device_nbytes() == 0
    device.unreserve(MIB)
    assert device.free_device_nbytes() == MIB
    with pytest.raises(HardwareError, match="1 device bytes cannot be given back, 0 are reserved"):
        device.unreserve(1)


def test_arenas_lie_within_the_reservation_to_the_byte(device: EmulatedDevice) -> None:
    with pytest.raises(HardwareError, match="reserve before"):
        device.allocate_arena(1)
    device.reserve(MIB)
    sizes = [1, 511, 513, 100_001]
    arenas = [device.allocate_arena(nbytes) for nbytes in [*sizes, MIB - sum(sizes)]]
    assert sum(arena.numel() for arena in arenas) == MIB
    assert all(arena.dtype == torch.uint8 and arena.data_ptr() % 256 == 0 for arena in arenas)
    with pytest.raises(HardwareError, match=f"an arena of 1 bytes .* hold {MIB}"):
        device.allocate_arena(1)
    assert device.num_allocations() == 5
    device.free_arena(arenas.pop(0))
    assert device.allocate_arena(1).numel() == 1
    assert device.allocate_arena(0).numel() == 0


def test_a_dead_arena_makes_room_and_a_living_one_outlasts_its_reservation(device: EmulatedDevice) -> None:
    device.reserve(MIB)
    arena = device.allocate_arena(600 * KIB)
    device.unreserve(MIB)
    assert device.free_device_nbytes() == 424 * KIB, "the arena is still there"
    device.reserve(424 * KIB)
    second = device.allocate_arena(424 * KIB)
    del arena
    gc.collect()
    assert device.free_device_nbytes() == 600 * KIB
    device.reserve(600 * KIB)
    third = device.allocate_arena(600 * KIB)
    assert second.numel() + third.numel() == MIB


def test_homes_count_to_the_byte(device: EmulatedDevice) -> None:
    first = device.allocate_home(4 * MIB - 10)
    assert device.free_host_nbytes() == 10
    with pytest.raises(HardwareError, match=rf"a home of 11 bytes .* 10 of {4 * MIB} host bytes are free"):
        device.allocate_home(11)
    second = device.allocate_home(10)
    assert not first.any() and not second.any()
    first.fill_(1)
    view = first[5:]
    device.free_home(first)
    assert device.free_host_nbytes() == 4 * MIB - 10
    assert not view.any()
    with pytest.raises(HardwareError, match="already freed"):
        device.free_home(first)
    with pytest.raises(HardwareError, match="not the start of a home"):
        device.free_home(second[1:])
    again = device.allocate_home(4 * MIB - 10)
    assert not again.any()
    assert device.num_allocations() == 3
    device.free_home(device.allocate_home(0))


def test_a_collected_home_is_credited(device: EmulatedDevice) -> None:
    for _ in range(8):
        home = device.allocate_home(3 * MIB)
        home.fill_(1)
        del home
    assert device.free_host_nbytes() == 4 * MIB


def test_poison_is_nan_in_fresh_and_freed_memory() -> None:
    device = EmulatedDevice("emulated", MIB, MIB, DebugSettings(poison=True))
    device.reserve(KIB)
    arena = device.allocate_arena(KIB)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert arena.view(dtype).isnan().all()
    arena.zero_()
    device.freed(arena[256:512])
    assert arena[256:512].view(torch.float32).isnan().all()
    assert not arena[:256].any() and not arena[512:].any()


def test_without_poison_freed_memory_keeps_its_bytes(device: EmulatedDevice) -> None:
    device.reserve(KIB)
    arena = device.allocate_arena(KIB).fill_(5)
    device.freed(arena)
    assert bool((arena == 5).all())


@pytest.mark.parametrize("stream", [Stream.H2D, Stream.COMPUTE])
def test_work_is_read_while_it_runs(stream: Stream) -> None:
    device = EmulatedDevice("emulated", 64 * MIB, MIB)
    if not device.meter.available:
        pytest.skip("malloc is not glibc's: no reading")

    def work() -> None:
        temporary = torch.empty(24 * MIB, dtype=torch.uint8)
        deadline_s = time.monotonic() + 60
        while (device.meter.peak_nbytes or 0) < temporary.numel() // 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)  # the reading thread of a busy machine may wake up late
        del temporary

    device.start_reading()
    device.launch(stream, "f0", [], work).wait()
    peak = device.read_nonmodel_nbytes()
    device.start_reading()
    after = device.read_nonmodel_nbytes()
    device.close()
    assert 23 * MIB < peak < 26 * MIB
    assert after < MIB


def test_arena_and_homes_are_no_nonmodel_bytes() -> None:
    device = EmulatedDevice("emulated", 32 * MIB, 32 * MIB)
    device.start_reading()
    device.reserve(32 * MIB)
    held = [device.allocate_arena(32 * MIB).fill_(1), device.allocate_home(32 * MIB).fill_(1)]
    assert device.read_nonmodel_nbytes() < MIB
    assert len(held) == 2
    device.close()


NUM_CHUNKS = 6
NUM_SLOTS = 2
CHUNK_NBYTES = 4 * KIB


class Pipeline:
    """Chunks pass through slots and change at home; ``forget_reuse``: a fetch waits for no eviction, a race."""

    def __init__(self, settings: DebugSettings, *, forget_reuse: bool = False) -> None:
        self.device = EmulatedDevice("emulated", MIB, MIB, settings)
        self.device.reserve(NUM_SLOTS * CHUNK_NBYTES)
        arena = self.device.allocate_arena(NUM_SLOTS * CHUNK_NBYTES)
        self.slots = arena.view(torch.float32).view(NUM_SLOTS, -1)
        self.homes = self.device.allocate_home(NUM_CHUNKS * CHUNK_NBYTES).view(torch.float32).view(NUM_CHUNKS, -1)
        self.homes.copy_(torch.arange(self.homes.numel()).view_as(self.homes) / 7)
        self.emptied: dict[int, Event] = {}
        self.landed: dict[int, Event] = {}
        self.forget_reuse = forget_reuse

    def run(self) -> torch.Tensor:
        fetched = self.fetch(0)
        for position in range(2 * NUM_CHUNKS):
            ahead = self.fetch(position + 1)
            self.compute_and_evict(position, fetched)
            fetched = ahead
        self.device.synchronize()
        result = self.homes.clone()
        self.device.close()
        return result

    def fetch(self, position: int) -> Event:
        home, slot = self.homes[position % NUM_CHUNKS], self.slots[position % NUM_SLOTS]
        waits = [self.landed[position % NUM_CHUNKS]] if position >= NUM_CHUNKS else []
        if position >= NUM_SLOTS and not self.forget_reuse:
            waits.append(self.emptied[position % NUM_SLOTS])
        return self.device.launch(Stream.H2D, f"f{position}", waits, lambda: (slot.copy_(home), None)[1])

    def compute_and_evict(self, position: int, fetched: Event) -> None:
        home, slot = self.homes[position % NUM_CHUNKS], self.slots[position % NUM_SLOTS]

        def evict() -> None:
            home.copy_(slot)
            self.device.freed(slot.view(torch.uint8))

        def compute() -> None:
            slot.mul_(1.25).add_(slot.mean())

        def update() -> None:
            home.sub_(home.max() / 3)

        computed = self.device.launch(Stream.COMPUTE, f"c{position}", [fetched], compute)
        evicted = self.device.launch(Stream.D2H, f"e{position}", [computed], evict)
        self.emptied[position % NUM_SLOTS] = evicted
        self.landed[position % NUM_CHUNKS] = self.device.launch(Stream.CPU, f"s{position}", [evicted], update)


def run_pipeline(settings: DebugSettings, *, forget_reuse: bool = False) -> torch.Tensor:
    return Pipeline(settings, forget_reuse=forget_reuse).run()


def expected_homes() -> torch.Tensor:
    homes = torch.arange(NUM_CHUNKS * CHUNK_NBYTES // 4).view(NUM_CHUNKS, -1) / 7
    for _, home in itertools.product(range(2), homes):
        home.mul_(1.25).add_(home.mean())
        home.sub_(home.max() / 3)
    return homes


@pytest.mark.parametrize(
    "settings",
    [
        DebugSettings(),
        DebugSettings(poison=True),
        DebugSettings(synchronous=True),
        DebugSettings(poison=True, synchronous=True, max_delay_ms=0.1),
    ],
)
def test_a_copy_pipeline_is_equal_to_the_bit(settings: DebugSettings) -> None:
    assert torch.equal(run_pipeline(settings), expected_homes())


@pytest.mark.long
def test_a_hundred_seeds_of_delays_are_equal_to_the_bit() -> None:
    expected = expected_homes()
    for seed in range(100):
        settings = DebugSettings(poison=True, max_delay_ms=0.4, seed=seed)
        assert torch.equal(run_pipeline(settings), expected), seed


def test_delays_and_poison_find_a_forgotten_wait() -> None:
    expected = expected_homes()
    settings = [DebugSettings(poison=True, max_delay_ms=2.0, seed=seed) for seed in range(10)]
    assert any(not torch.equal(run_pipeline(each, forget_reuse=True), expected) for each in settings)


def test_delays_follow_the_seed() -> None:
    def slept(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        pauses: list[float] = []
        monkeypatch.setattr(time, "sleep", pauses.append)
        device = EmulatedDevice("emulated", MIB, MIB, DebugSettings(max_delay_ms=3.0, seed=seed, synchronous=True))
        for stream in Stream:
            device.launch(stream, "f0", [], lambda: None)
        return pauses

    with pytest.MonkeyPatch.context() as monkeypatch:
        first, again, other = (slept(seed, monkeypatch) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 2 * len(Stream)
    assert all(0 <= pause <= 0.003 for pause in first)


def test_launching_is_cheap(device: EmulatedDevice) -> None:
    def microseconds(stream: Stream) -> float:
        start = time.perf_counter()
        event = device.launch(stream, "f0", [], lambda: None)
        for _ in range(999):
            event = device.launch(stream, "f0", [event], lambda: None)
        event.wait()
        return (time.perf_counter() - start) * 1e3

    best = {stream: min(microseconds(stream) for _ in range(5)) for stream in (Stream.COMPUTE, Stream.H2D)}
    assert max(best.values()) < 200, best
