"""Rates of a machine: from the catalogue with its assumptions, from a calibration, or refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from costs import calibration

from chunkc.cost.rates import cost_rates, update_nbytes
from chunkc.cost.sharing import HOST_DRAM, Capacities, Measured
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware
from chunkc.hardware.assumptions import assumed, host_of
from chunkc.hardware.catalogue import gpus, machines, read_catalogue
from chunkc.ir.actions import Stream
from chunkc.ir.state_spec import ADAM_8BIT_STATES, ADAM_STATES, StateSpec

TOML = (Path(__file__).parents[2] / "chunkc" / "hardware" / "hardware.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("gpu", gpus())
def test_every_gpu_of_the_catalogue_can_be_simulated(gpu: str) -> None:
    hw = Hardware.parse(f"{gpu}-512g")
    rates = cost_rates(hw)
    assert hw.tflops is not None and hw.hbm_gb_per_s is not None
    dtype = "float16" if hw.tflops.bf16 == 0 else "bfloat16"
    assert 0.1 * hw.tflops.fp16 < rates.attention_tflops[dtype] <= rates.matmul_tflops[dtype] < hw.tflops.fp16
    assert 0.5 * hw.hbm_gb_per_s < rates.device_memory_gb_per_s < hw.hbm_gb_per_s
    assert 0.1 < rates.cpu_update_gparam_per_s[dtype] < 20
    assert rates.gpu_update_gparam_per_s[dtype] > rates.cpu_update_gparam_per_s[dtype]
    assert not rates.runs_inline and rates.links is None


def test_every_assumption_has_its_reason_above_or_beside_it() -> None:
    lines = TOML[TOML.index("[assumed.default]") :].splitlines()
    explained = False
    for line in lines:
        if line.startswith("#"):
            explained = True
        elif re.match(r"\w+ = ", line):
            assert explained or "#" in line, line
        elif not line:
            explained = False
    assert set(read_catalogue()["host"]) == set(gpus())


def test_updates_of_other_states_are_as_fast_by_bytes() -> None:
    rates, table, lion = (
        cost_rates(Hardware.parse("v100-240g")),
        {"float16": 1.0},
        StateSpec(("exp_avg",), ("float32",)),
    )
    assert (update_nbytes("float16", lion), update_nbytes("float32", StateSpec((), ()))) == (20, 16)
    assert rates.update_gparam_per_s(table, "float16", ADAM_STATES) == 1.0
    assert rates.update_gparam_per_s(table, "float16", lion) == pytest.approx(28 / 20)
    codes = StateSpec(ADAM_STATES.names, ("uint8", "uint8"))
    assert update_nbytes("float16", codes) == 2 * (4 + 2 + 2 + 2 * 4 / 256)
    assert rates.update_gparam_per_s(table, "float16", codes) == 1.0, "it computes more, and is not counted as faster"
    assert rates.update_gparam_per_s(table | {"bfloat16 8-bit": 0.25}, "float16", codes) == 0.25


def test_figures_of_a_v100_by_hand() -> None:
    rates, share = cost_rates(Hardware.parse("v100-240g")), assumed("v100")
    host = host_of("v100")
    assert host is not None
    assert rates.matmul_tflops["float16"] == pytest.approx(125 * 0.66)
    assert rates.matmul_tflops["float32"] == pytest.approx(15.7 * 0.66)
    assert rates.of_dtype(rates.matmul_tflops, "bfloat16") == rates.matmul_tflops["float16"]
    assert rates.copies[Stream.H2D].time_ms(12_600_000) == pytest.approx(0.01 + 1.0)  # 15.75 GB/s * 0.8
    assert update_nbytes("float16") == 28
    assert rates.cpu_update_gparam_per_s["float16"] == pytest.approx(min(40 * 0.5, 153.6 * 0.43 / 28))
    assert rates.cpu_update_gparam_per_s["float16 8-bit"] == pytest.approx(min(40 * 0.5 * 0.4, 153.6 * 0.43 / 16.0625))
    assert share.collective_efficiency == 0.75


@pytest.mark.parametrize(("gpu", "tflops"), [("a100", 312 * 0.74), ("h100", 989.5 * 0.6), ("h200", 989.5 * 0.6)])
def test_matrix_products_reach_what_public_training_runs_show(gpu: str, tflops: float) -> None:
    """Shares that follow from llm-foundry's throughput tables; hardware.toml says how."""
    assert cost_rates(Hardware.parse(f"{gpu}-512g")).matmul_tflops["bfloat16"] == pytest.approx(tflops)


def test_ranks_of_a_node_share_its_memory_and_cores() -> None:
    one, eight = (cost_rates(Hardware.parse(f"{n}v100-240g")) for n in ("", "8x"))
    assert eight.cpu_update_gparam_per_s["float16"] == pytest.approx(one.cpu_update_gparam_per_s["float16"] / 8)
    assert isinstance(one.sharing, Capacities) and isinstance(eight.sharing, Capacities)
    assert eight.sharing.gb_per_s[HOST_DRAM] == pytest.approx(one.sharing.gb_per_s[HOST_DRAM] / 8)
    assert eight.copies == one.copies


@pytest.mark.parametrize("alias", machines())
def test_machines_of_the_papers_have_links_where_they_have_ranks(alias: str) -> None:
    hw = Hardware.parse(alias)
    links = cost_rates(hw).links
    assert (links is None) == (hw.num_gpus == 1)
    if links is not None:
        assert links.is_host_link == (hw.nvlink_gb_per_s is None)
        assert links.node_gb_per_s is None and links.gpus_per_node == 8


def test_collectives_reach_what_the_paper_saturates() -> None:
    yard, pod = (cost_rates(Hardware.parse(name)).links for name in ("yard", "superpod"))
    assert yard is not None and pod is not None
    assert yard.gpu_gb_per_s == pytest.approx(113, rel=0.01)
    assert pod.gpu_gb_per_s == pytest.approx(208, rel=0.01)


def test_nodes_exchange_over_their_network() -> None:
    two = cost_rates(replace(Hardware.parse("2x8xa100-40g-1024g"), internode_gb_per_s=50.0)).links
    assert two is not None and two.node_gb_per_s == pytest.approx(50 * 0.69)


@pytest.mark.parametrize("text", ["emulated-64m-2g", "sm86-10g-32g"])
def test_a_machine_without_rates_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(HardwareError, match=f"{text} is has to be measured.*chunkc calibrate --hw {text}"):
        cost_rates(Hardware.parse(text))


def test_a_calibration_takes_the_place_of_the_catalogue() -> None:
    measured = calibration({})
    emulated = cost_rates(replace(Hardware.parse("emulated-64m-2g"), rates=measured))
    assert emulated.runs_inline and isinstance(emulated.sharing, Measured)
    copy = emulated.copies[Stream.H2D]
    assert (copy.latency_us, copy.gb_per_s) == (7.0, 10.0)
    assert (emulated.compute_launch_us, emulated.copy_launch_us, emulated.handoff_us) == (3.0, 4.0, 12.0)
    assert emulated.device_memory_gb_per_s == 40.0 and emulated.links is None
    gpu = cost_rates(replace(Hardware.parse("8xa100-40g-1024g"), rates=measured))
    assert not gpu.runs_inline and gpu.matmul_tflops == {"float32": 2.0}
    assert gpu.links == cost_rates(Hardware.parse("8xa100-40g-1024g")).links
    assert gpu.kernel_launch_us == assumed("a100").kernel_launch_us
    by_codes = assumed("a100").block_update_share  # what an older calibration has not measured
    whole = {"float32": 2.0, "float32 8-bit": 2.0 * by_codes}  # one rank has the whole host
    assert emulated.cpu_update_gparam_per_s == whole
    assert gpu.cpu_update_gparam_per_s == {name: rate / 8 for name, rate in whole.items()}
    on_gpu = emulated.gpu_update_gparam_per_s
    assert on_gpu["float32 8-bit"] == on_gpu["float32"] * assumed("a100").gpu_block_update_share


def test_a_gpu_is_slower_at_8_bit_states_by_the_catalogue_too() -> None:
    rates = cost_rates(Hardware.parse("a100-40g-1024g"))
    fp32, codes = (
        rates.update_gparam_per_s(rates.gpu_update_gparam_per_s, "bfloat16", s) for s in (ADAM_STATES, ADAM_8BIT_STATES)
    )
    assert codes == pytest.approx(0.49 * fp32)
