"""The time of single actions, by hand."""

from dataclasses import replace

import pytest
from costs import COPY, LINKS, RATES, copies, rates, with_work
from plans import distributed, evicting, grad_chunk, spanning, streaming

from chunkc.cost.actions import ActionCosts, sharing_dims
from chunkc.cost.rates import CopyLaw, cost_rates, update_nbytes
from chunkc.cost.sharing import FROM_DEVICE, HOST_DRAM, TO_DEVICE
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware
from chunkc.ir.actions import Stream, parse
from chunkc.ir.state_spec import ADAM_8BIT_STATES
from chunkc.ir.work import Kind, Work

TIMES = {
    "fetch c0 -> d0 @h2d": 1.0,
    "evict c0 <- d0 @d2h": 1.0,
    "load os0 -> d2 @h2d": 3.0,
    "store os0 <- d2 @d2h": 3.0,
    "update c0 @cpu": 2.0,
    "update c0 @compute": 1.0,
    "restore c0 @cpu": 2.0 * 8 / 32,
    "norm c0 @compute": 1.0 * 4 / 32,
    "decide @compute": 0.0,
    "drop c0 <- d0 @compute": 0.0,
    "stash c0 of bwd.0 @compute": 1.0,
    "run fwd.0 @compute": 5.0,
}


@pytest.mark.parametrize("text", TIMES)
def test_time_alone(text: str) -> None:
    costs = ActionCosts(with_work(streaming().build(), 5), RATES)
    assert costs.of(parse(text)).alone_ms == pytest.approx(TIMES[text])


def test_updates_of_8_bit_states_take_their_own_rates_time() -> None:
    """A host that decodes and encodes an eighth as many parameters a second takes eight times as long."""
    plan = streaming().build()
    plan = replace(plan, layout=replace(plan.layout, state_spec=ADAM_8BIT_STATES))
    tables = {"cpu_update_gparam_per_s": {"float32": 32e-6, "float32 8-bit": 4e-6}}
    tables["gpu_update_gparam_per_s"] = {"float32": 64e-6, "float32 8-bit": 32e-6}
    costs, update = ActionCosts(plan, rates(**tables)), parse("update c0 @cpu")
    assert costs.of(update).alone_ms == pytest.approx(8 * TIMES["update c0 @cpu"])
    assert costs.of(parse("update c0 @compute")).alone_ms == pytest.approx(2 * TIMES["update c0 @compute"])
    assert dict(costs.of(update).use.demands) == {
        HOST_DRAM: pytest.approx(4e-6 * update_nbytes("float32", plan.layout.state_spec))
    }


def test_a_copy_has_a_latency_and_each_direction_its_own_law() -> None:
    costs = ActionCosts(evicting().build(), rates(copies=copies(CopyLaw(500.0, 512e-6), COPY)))
    assert costs.of(parse("fetch c0 -> d0 @h2d")).alone_ms == pytest.approx(0.5 + 0.5)
    assert costs.of(parse("evict c0 <- d0 @d2h")).alone_ms == pytest.approx(1.0)


def test_a_segment_takes_the_longer_of_arithmetic_and_bytes_of_each_kind() -> None:
    work = (
        Work(Kind.ATTENTION, "float32", 3, 512, 1),  # 3 ms by arithmetic at 1e-9 TFLOPS, 1 ms by bytes
        Work(Kind.MATMUL, "float32", 2, 512 * 7, 4),  # 2 ms, 7 ms
        Work(Kind.MEMORY, "", 0, 256, 2),
    )
    plan = evicting().build()
    plan = replace(plan, segments=(replace(plan.segments[0], work=work), *plan.segments[1:]))
    run = parse("run fwd.0 @compute")
    found = ActionCosts(plan, rates(kernel_launch_us=10.0, compute_launch_us=70.0)).of(run)
    assert found.alone_ms == pytest.approx(3 + 7 + 0.5)
    assert (found.launch_ms, found.kernels_ms) == (pytest.approx(0.07), pytest.approx(7 * 0.01))
    inline = ActionCosts(plan, rates(kernel_launch_us=10.0, runs_inline=True)).of(run)
    assert (inline.alone_ms, inline.kernels_ms) == (pytest.approx(3 + 7 + 0.5 + 0.07), 0.0)


def test_gradients_land_by_their_part_in_the_chunk() -> None:
    """w0 has 64 of its elements in c0 and 32 in c1; c1 of bwd.0 gets the 32 of w1; half a chunk takes half as long."""
    costs = ActionCosts(spanning().build(), RATES)
    texts = ("stash c0 of bwd.1 @compute", "stash c1 of bwd.1 @compute", "stash c1 of bwd.0 @compute")
    assert [costs.of(parse(text)).alone_ms for text in texts] == pytest.approx([1.0, 0.5, 0.5])
    beside = ActionCosts(grad_chunk().build(), RATES)
    assert beside.of(parse("stash c1 of bwd.0 @compute")).alone_ms == pytest.approx(1.0)


def test_collectives_move_the_other_ranks_chunks() -> None:
    costs = ActionCosts(distributed().build(), rates(links=replace(LINKS, hop_us=500.0)))
    for text in ("gather g0 @comm", "reduce g0 @comm"):
        found = costs.of(parse(text))
        assert (found.alone_ms, found.nbytes) == (pytest.approx(1.0 + 0.5), 256)
    assert costs.of(parse("sum @comm")).alone_ms == pytest.approx(0.5 + 16 / 256), "16 bytes of each"


def test_replicas_exchange_means_over_the_network_behind_reductions() -> None:
    """Two ranks on each of four nodes: each makes a quarter of its chunk's mean and has three quarters from others, so
    2 x 3/4 of 256 bytes, for both ranks of a node through one network."""
    plan = distributed().build()
    plan = replace(plan, layout=replace(plan.layout, num_replicas=4))
    links = replace(LINKS, gpus_per_node=2, node_gb_per_s=128e-6, hop_us=500.0)
    costs = ActionCosts(plan, rates(links=links))
    found = costs.of(parse("reduce g0 @comm"))
    assert (found.alone_ms, found.nbytes) == (pytest.approx(1.0 + 0.5 + 2 * 384 / 128 + 6 * 0.5), 256 + 384)
    assert found.nbytes == plan.layout.moved_nbytes(parse("reduce g0 @comm"))
    for text in ("gather g0 @comm", "sum @comm"):
        alone = ActionCosts(distributed().build(), rates(links=links)).of(parse(text))
        assert costs.of(parse(text)) == alone, "within nodes as ever"
    with pytest.raises(HardwareError, match="4 ranks that exchange stand on several nodes of 2, but"):
        ActionCosts(plan, rates(links=replace(links, node_gb_per_s=None))).of(parse("reduce g0 @comm"))


def test_replicas_within_a_node_exchange_means_over_its_links() -> None:
    """Four pairs on one node: 2 x 3/4 of 256 bytes over each rank's own link."""
    plan = distributed().build()
    plan = replace(plan, layout=replace(plan.layout, num_replicas=4))
    found = ActionCosts(plan, RATES).of(parse("reduce g0 @comm"))
    assert (found.alone_ms, found.nbytes) == (pytest.approx(1.0 + 1.5), 256 + 384)


def test_ranks_that_divide_chunks_may_stand_on_other_nodes() -> None:
    """By tp=4 inside of dp_shard=2 on nodes of four, four pairs exchange chunks over a network of 128 bytes a ms."""
    plan = replace(distributed().build(), mesh=(("dp_shard", 2), ("tp", 4)))
    links = replace(LINKS, gpus_per_node=4, node_gb_per_s=128e-6)
    costs = ActionCosts(plan, rates(links=links))
    assert costs.of(parse("gather g0 @comm")).alone_ms == pytest.approx(4 * 256 / 128)
    in_node = ActionCosts(plan, RATES)
    assert in_node.of(parse("gather g0 @comm")).alone_ms == pytest.approx(1.0)


def test_ranks_with_slices_exchange_chunks_as_those_that_divide_them() -> None:
    """And keys and values among themselves: of two slices on two nodes, over the network of 128 bytes a ms."""
    work = (Work(Kind.LINK, "", 0, 768, 2),)
    plan = distributed().build()
    plan = replace(plan, segments=(replace(plan.segments[0], work=work), *plan.segments[1:]))
    links = replace(LINKS, gpus_per_node=1, node_gb_per_s=128e-6, hop_us=500.0)
    alone, sliced = (ActionCosts(p, rates(links=links)) for p in (plan, replace(plan, mesh=(("cp", 2),))))
    gather, run = parse("gather g0 @comm"), parse("run fwd.0 @compute")
    assert sliced.of(gather).alone_ms == alone.of(gather).alone_ms > 0
    assert sliced.of(run).alone_ms == pytest.approx(768 / 128 + 1.0)
    assert sharing_dims((("dp_replicate", 2), ("dp_shard", 3), ("cp", 2))) == (("dp_replicate", 2), ("dp_shard", 6))
    assert sharing_dims((("dp_replicate", 2), ("cp", 2))) == (("dp_replicate", 2), ("dp_shard", 2))
    assert sharing_dims((("dp_shard", 2), ("tp", 2))) == (("dp_shard", 2), ("tp", 2))


def test_what_a_model_exchanges_goes_the_way_of_its_tensor_ranks() -> None:
    """768 bytes from three others in two collectives: over a rank's link, or, of four lines, over the network."""
    work = (Work(Kind.LINK, "", 0, 768, 2),)
    plan = distributed().build()
    plan = replace(plan, segments=(replace(plan.segments[0], work=work), *plan.segments[1:]))
    links = replace(LINKS, gpus_per_node=4, node_gb_per_s=1024e-6, hop_us=500.0)
    inner, outer = (replace(plan, mesh=m) for m in ((("dp_shard", 2), ("tp", 4)), (("tp", 4), ("dp_shard", 2))))
    times = [ActionCosts(p, rates(links=links)).of(parse("run fwd.0 @compute")).alone_ms for p in (plan, inner, outer)]
    # by the outer mesh two ranks of a line share a node: over the network, two lines of two parts each, so 4 x 256
    assert times == pytest.approx([3.0 + 1.0, 3.0 + 1.0, max(3.0, 4 * 256 / 1024) + 1.0])
    slow = rates(links=replace(links, node_gb_per_s=128e-6))
    assert ActionCosts(outer, slow).of(parse("run fwd.0 @compute")).alone_ms == pytest.approx(4 * 256 / 128 + 1.0)
    assert ActionCosts(inner, slow).of(parse("run fwd.0 @compute")).alone_ms == pytest.approx(3.0 + 1.0)


def test_six_times_the_parameters_go_over_the_links_in_a_step() -> None:
    """Two gathers and a reduction of every group: 6 (p - 1) / p bytes for each parameter of 2 bytes, 12 for 4 bytes."""
    plan = distributed().build()
    costs = ActionCosts(plan, RATES)
    actions = [a for p in plan.programs[:3] for a in p.actions if a.stream is Stream.COMM]
    moved = sum(costs.of(a).nbytes for a in actions)
    gathered_once = 1  # g1 stays gathered into backward
    assert moved == (12 * 1 / 2 * 256) - gathered_once * 256


def test_ranks_without_known_links_are_refused() -> None:
    costs = ActionCosts(distributed().build(), rates(links=None))
    with pytest.raises(HardwareError, match="between 2 ranks, but round has no rates of links"):
        costs.of(parse("gather g0 @comm"))


def test_copies_and_updates_share_host_memory_and_pcie_collectives_the_link() -> None:
    found = cost_rates(Hardware.parse("hai-pcie"))
    costs = ActionCosts(distributed().build(), found)
    demands = {
        text: dict(costs.of(parse(text)).use.demands)
        for text in ("fetch c0 -> d0 @h2d", "evict c0 <- d0 @d2h", "update c0 @cpu", "gather g0 @comm")
    }
    assert set(demands["fetch c0 -> d0 @h2d"]) == {HOST_DRAM, TO_DEVICE}
    assert set(demands["evict c0 <- d0 @d2h"]) == {HOST_DRAM, FROM_DEVICE}
    assert set(demands["gather g0 @comm"]) == {TO_DEVICE, FROM_DEVICE}
    assert demands["update c0 @cpu"] == {HOST_DRAM: pytest.approx(found.cpu_update_gparam_per_s["float32"] * 32)}
    nvlink = ActionCosts(distributed().build(), cost_rates(Hardware.parse("superpod")))
    assert nvlink.of(parse("gather g0 @comm")).use.demands == ()
