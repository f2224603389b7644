"""The rates of one rank of a machine, from a calibrated profile, else from the catalogue.

All ranks of a node do the same at the same time, so each has an equal share of the host's memory bandwidth and cores.
Figures of a data sheet are multiplied by the assumed efficiency; measured ones are taken as they are. The emulated
device carries its computations out on the thread that launches them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from chunkc.cost.sharing import FROM_DEVICE, HOST_DRAM, TO_DEVICE, Alone, Capacities, Measured, Sharing
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware
from chunkc.hardware.assumptions import Assumed, Host, assumed, host_of
from chunkc.hardware.profile import DtypeRate, Rates, of_8bit_states
from chunkc.ir.actions import Stream
from chunkc.ir.schedule import DTYPE_NBYTES, FLOAT_DTYPES
from chunkc.ir.state_spec import ADAM_8BIT_STATES, ADAM_STATES, BLOCK_NUMEL, StateSpec
from chunkc.ir.tiers import COPIED_TIERS

_SIXTEEN_BITS = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class CopyLaw:
    """Time of a copy alone: ``latency_us`` and bytes by ``gb_per_s``."""

    latency_us: float
    gb_per_s: float

    def time_ms(self, nbytes: int) -> float:
        return self.latency_us * 1e-3 + nbytes / self.gb_per_s * 1e-6


@dataclass(frozen=True, slots=True)
class Links:
    """Links over which ranks exchange chunks: what collectives reach, 1e9 bytes per second and direction.

    ``gpu_gb_per_s``: one device to the others of its node; ``node_gb_per_s``: one node to the others, all ranks
    together. ``hop_us``: latency for each rank beyond the first. ``is_host_link``: copies use the same link.
    """

    gpu_gb_per_s: float
    node_gb_per_s: float | None
    gpus_per_node: int
    hop_us: float
    is_host_link: bool


@dataclass(frozen=True, slots=True)
class CostRates:
    """One rank's rates: 1e12 operations per second by dtype (``float32`` is always there), and others.

    ``copies``: between adjacent tiers, as `chunkc.ir.tiers.COPIED_TIERS` says of each stream.
    Updates are Adam's by dtype of the payload, those of 8-bit states as `of_8bit_states` names them, 1e9 parameters per
    second. ``compute_launch_us``, ``copy_launch_us``:
    host time for an action on the compute stream, on another. ``handoff_us``: from the end of an action on one stream
    to the start of one on another that waits for it. ``second_home_factor``: time of an update on the host that writes
    elsewhere than it reads, by that of one in place. ``runs_inline``: the host computes itself what it launches.
    """

    hw: str
    matmul_tflops: Mapping[str, float]
    attention_tflops: Mapping[str, float]
    device_memory_gb_per_s: float
    copies: Mapping[Stream, CopyLaw]
    cpu_update_gparam_per_s: Mapping[str, float]
    gpu_update_gparam_per_s: Mapping[str, float]
    links: Links | None = None
    kernel_launch_us: float = 0.0
    compute_launch_us: float = 0.0
    copy_launch_us: float = 0.0
    handoff_us: float = 0.0
    second_home_factor: float = 1.0
    runs_inline: bool = False
    sharing: Sharing = Alone()  # noqa: RUF009 - frozen

    def of_dtype(self, table: Mapping[str, float], dtype: str) -> float:
        """Entry for ``dtype``, else for the other 16-bit kind or fp32; HardwareError if none was measured."""
        rate = next((table[name] for name in _alike(dtype) if name in table), None)
        if rate is None:
            raise HardwareError(
                f"the rates of {self.hw} have none for {dtype or 'float32'}: calibrate the machine again"
            )
        return rate

    def update_gparam_per_s(self, table: Mapping[str, float], dtype: str, states: StateSpec) -> float:
        """The rate of updates of ``states``: as many bytes a second as Adam's in ``table``.

        Quantised states, which cost more to compute than to move, have entries of their own. Without one, as many
        parameters a second as Adam's.
        """
        if states.quantised:
            names = [of_8bit_states(name) for name in _alike(dtype)]
            return next((table[name] for name in names if name in table), self.of_dtype(table, dtype))
        return self.of_dtype(table, dtype) * (update_nbytes(dtype) / update_nbytes(dtype, states))


def _alike(dtype: str) -> Iterator[str]:
    """Dtypes whose rates stand for one another, the likeliest first."""
    yield from (dtype, *(name for name in _SIXTEEN_BITS if dtype in _SIXTEEN_BITS), "float32")


def update_nbytes(dtype: str, states: StateSpec = ADAM_STATES) -> float:
    """Bytes that an update moves for one parameter: gradient, master, states; master, states, parameter."""
    return 2 * (states.nbytes_of(BLOCK_NUMEL) / BLOCK_NUMEL + DTYPE_NBYTES[dtype])


def cost_rates(hw: Hardware) -> CostRates:
    """The rates of one rank of ``hw``; where they are not known, HardwareError says what would help."""
    rates = known_rates(hw)
    if rates is None:
        raise HardwareError(
            f"how fast {hw} is has to be measured before a plan for it can be simulated: run `chunkc calibrate --hw "
            f"{hw} -o profile.json` there, and name profile.json as the hardware"
        )
    return rates


def known_rates(hw: Hardware) -> CostRates | None:
    """The rates of one rank of ``hw``, or None where neither the catalogue nor a calibration knows them."""
    known = None if hw.tflops is None or host_of(hw.gpu) is None else _of_catalogue(hw)
    return known if hw.rates is None else _of_calibration(hw, hw.rates, known)


def _of_catalogue(hw: Hardware) -> CostRates:
    share, host = assumed(hw.gpu), host_of(hw.gpu)
    if hw.tflops is None or host is None or hw.hbm_gb_per_s is None or hw.host_link_gb_per_s is None:
        raise HardwareError(f"{hw} lacks rates in the catalogue; calibrate it")
    peak = {"float32": hw.tflops.fp32, "bfloat16": hw.tflops.bf16, "float16": hw.tflops.fp16}
    memory = hw.hbm_gb_per_s * share.device_memory_efficiency
    gpu_updates = {d: memory / update_nbytes(d) for d in FLOAT_DTYPES}
    copy = CopyLaw(share.copy_latency_us, hw.host_link_gb_per_s * share.host_link_efficiency)
    link = hw.host_link_gb_per_s * share.host_link_efficiency
    dram = host.dram_gb_per_s * share.dram_efficiency / hw.gpus_per_node
    return CostRates(
        hw=str(hw),
        matmul_tflops={d: rate * share.matmul_efficiency for d, rate in peak.items() if rate},
        attention_tflops={d: rate * share.attention_efficiency for d, rate in peak.items() if rate},
        device_memory_gb_per_s=memory,
        copies=dict.fromkeys(COPIED_TIERS, copy),
        cpu_update_gparam_per_s={
            **{d: _cpu_update(hw, host, share, d, ADAM_STATES) for d in FLOAT_DTYPES},
            **{of_8bit_states(d): _cpu_update(hw, host, share, d, ADAM_8BIT_STATES) for d in FLOAT_DTYPES},
        },
        gpu_update_gparam_per_s=_with_8bit(gpu_updates, share.gpu_block_update_share),
        links=_links(hw, host, share),
        kernel_launch_us=share.kernel_launch_us,
        compute_launch_us=share.action_launch_us,
        copy_launch_us=share.action_launch_us,
        handoff_us=share.handoff_us,
        second_home_factor=share.second_home_factor,
        sharing=Capacities({HOST_DRAM: dram, TO_DEVICE: link, FROM_DEVICE: link}),
    )


def _cpu_update(hw: Hardware, host: Host, share: Assumed, dtype: str, states: StateSpec) -> float:
    """One rank's share of the lesser of what a node's cores compute and its memory moves."""
    per_core = share.cpu_update_gparam_per_s_per_core * (share.block_update_share if states.quantised else 1.0)
    cores = (hw.num_cpu_cores or host.num_cpu_cores) * per_core
    memory = host.dram_gb_per_s * share.dram_update_efficiency / update_nbytes(dtype, states)
    return min(cores, memory) / hw.gpus_per_node


def _links(hw: Hardware, host: Host, share: Assumed) -> Links | None:
    if hw.num_gpus == 1:
        return None
    node = hw.internode_gb_per_s or host.internode_gb_per_s
    if hw.nvlink_gb_per_s is not None:
        gpu = hw.nvlink_gb_per_s * share.collective_efficiency
    else:
        gpu = (hw.host_link_gb_per_s or 0.0) * share.host_link_efficiency
    return Links(
        gpu_gb_per_s=gpu,
        node_gb_per_s=node * share.collective_efficiency if hw.num_nodes > 1 else None,
        gpus_per_node=hw.gpus_per_node,
        hop_us=share.collective_hop_us,
        is_host_link=hw.nvlink_gb_per_s is None,
    )


def _of_calibration(hw: Hardware, rates: Rates, known: CostRates | None) -> CostRates:
    """Measured rates; those of links and kernel launches are the catalogue's, ranks share the host."""
    share = assumed(hw.gpu)
    cpu_updates = _with_8bit(_by_dtype(rates.cpu_update_gparam_per_s), share.block_update_share)
    measured = CostRates(
        hw=str(hw),
        matmul_tflops=_by_dtype(rates.matmul_tflops),
        attention_tflops=_by_dtype(rates.attention_tflops),
        device_memory_gb_per_s=rates.device_memory_gb_per_s.median,
        copies={
            stream: CopyLaw(rate.latency_us.median, rate.gb_per_s.median)
            for stream, rate in ((Stream.H2D, rates.h2d), (Stream.D2H, rates.d2h))
        },
        cpu_update_gparam_per_s={dtype: rate / hw.gpus_per_node for dtype, rate in cpu_updates.items()},
        gpu_update_gparam_per_s=_with_8bit(_by_dtype(rates.gpu_update_gparam_per_s), share.gpu_block_update_share),
        kernel_launch_us=rates.compute_launch_us.median,
        compute_launch_us=rates.compute_launch_us.median,
        copy_launch_us=rates.copy_launch_us.median,
        handoff_us=rates.handoff_us.median,
        second_home_factor=share.second_home_factor,
        runs_inline=hw.emulated,
        sharing=Measured(rates),
    )
    if known is None:
        return measured
    return replace(measured, links=known.links, kernel_launch_us=known.kernel_launch_us)


def _with_8bit(updates: Mapping[str, float], share: float) -> Mapping[str, float]:
    """Add rates of 8-bit states, a ``share`` of the others, where an older calibration has none."""
    known = {of_8bit_states(d): updates[d] * share for d in FLOAT_DTYPES if d in updates}
    return {**known, **updates}


def _by_dtype(rates: tuple[DtypeRate, ...]) -> Mapping[str, float]:
    return {entry.dtype: entry.rate.median for entry in rates}
