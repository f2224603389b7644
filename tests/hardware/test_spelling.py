"""The grammar of ``hw`` strings, both ways, and the words of each refusal."""

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkc.errors import ChunkcError, HardwareError
from chunkc.hardware import Hardware, format_size, parse_size, spelling
from chunkc.hardware.catalogue import gpu_spellings, gpus

KIB, MIB, GIB = 1024, 1024**2, 1024**3

# spelling -> canonical spelling, (nodes, GPUs per node, GPU, device bytes, host bytes)
SPELLINGS = [
    ("v100-240g", "v100-32g-240g", (1, 1, "v100", 32 * GIB, 240 * GIB)),
    ("V100-16G-240G", "v100-16g-240g", (1, 1, "v100", 16 * GIB, 240 * GIB)),
    ("8xv100-240g", "8xv100-32g-240g", (1, 8, "v100", 32 * GIB, 240 * GIB)),
    (" 1x8xv100-240g\n", "8xv100-32g-240g", (1, 8, "v100", 32 * GIB, 240 * GIB)),
    ("4x8xa100-40g-1024g", "4x8xa100-40g-1024g", (4, 8, "a100", 40 * GIB, 1024 * GIB)),
    ("2x1xt4-64g", "2x1xt4-16g-64g", (2, 1, "t4", 16 * GIB, 64 * GIB)),
    ("rtx2060-8g-16g", "rtx2060-8g-16g", (1, 1, "rtx2060", 8 * GIB, 16 * GIB)),
    ("4090-64g", "rtx4090-24g-64g", (1, 1, "rtx4090", 24 * GIB, 64 * GIB)),
    ("8x4090-64g", "8xrtx4090-24g-64g", (1, 8, "rtx4090", 24 * GIB, 64 * GIB)),
    ("a100-512g", "a100-80g-512g", (1, 1, "a100", 80 * GIB, 512 * GIB)),
    ("a100pcie-40g-512g", "a100pcie-40g-512g", (1, 1, "a100pcie", 40 * GIB, 512 * GIB)),
    ("v100-1.5g-32g", "v100-1536m-32g", (1, 1, "v100", 1536 * MIB, 32 * GIB)),
    ("v100-32g-32g", "v100-32g-32g", (1, 1, "v100", 32 * GIB, 32 * GIB)),
    ("emulated-64m-2g", "emulated-64m-2g", (1, 1, "emulated", 64 * MIB, 2 * GIB)),
    ("2xemulated-1m-64m", "2xemulated-1m-64m", (1, 2, "emulated", MIB, 64 * MIB)),
    ("emulated-100.5k-64m", "emulated-100.5k-64m", (1, 1, "emulated", 102912, 64 * MIB)),
    ("sm86-10g-32g", "sm86-10g-32g", (1, 1, "sm86", 10 * GIB, 32 * GIB)),
]


@pytest.mark.parametrize(("text", "canonical", "parts"), SPELLINGS)
def test_parse(text: str, canonical: str, parts: tuple[int, int, str, int, int]) -> None:
    hw = Hardware.parse(text)
    assert str(hw) == hw.name == canonical
    assert parts == (hw.num_nodes, hw.gpus_per_node, hw.gpu, hw.gpu_memory_nbytes, hw.host_memory_nbytes)
    assert Hardware.parse(canonical) == hw


sizes = st.integers(min_value=1, max_value=1024**6)


@given(
    gpu=st.sampled_from([*gpu_spellings(), "emulated", "sm75", "sm121"]),
    num_nodes=st.integers(1, 10_000),
    gpus_per_node=st.integers(1, 64),
    gpu_nbytes=sizes,
    host_nbytes=sizes,
    upper=st.booleans(),
)
def test_spelling_round_trip(
    gpu: str, num_nodes: int, gpus_per_node: int, gpu_nbytes: int, host_nbytes: int, upper: bool
) -> None:
    row = gpus().get(gpu_spellings().get(gpu, gpu))
    gpu_nbytes = gpu_nbytes if row is None else min(gpu_nbytes, row.variants[-1])
    text = f"{num_nodes}x{gpus_per_node}x{gpu}-{format_size(gpu_nbytes)}-{format_size(host_nbytes)}"
    hw = Hardware.parse(text.upper() if upper else text)
    assert (hw.num_nodes, hw.gpus_per_node) == (num_nodes, gpus_per_node)
    assert (hw.gpu_memory_nbytes, hw.host_memory_nbytes) == (gpu_nbytes, host_nbytes)
    assert Hardware.parse(str(hw)) == hw
    assert str(Hardware.parse(str(hw))) == str(hw)


@given(sizes)
def test_size_round_trip(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


def test_size_units() -> None:
    assert [parse_size(text) for text in ("1k", "1M", " 0.5g ", "1.9999k")] == [KIB, MIB, 512 * MIB, 2047]
    assert [format_size(n) for n in (KIB, MIB, 3 * GIB, 1537)] == ["1k", "1m", "3g", "1.5009765625k"]


@given(st.text(alphabet="0123456789xvemugtk1-. ", max_size=24))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        hw = Hardware.parse(text)
    except HardwareError as error:
        assert repr(text) in str(error)
    else:
        assert Hardware.parse(str(hw)) == hw


def test_ranks_share_the_host_memory_of_their_node() -> None:
    hw = Hardware.parse("4x8xa100-40g-1024g")
    assert hw.num_gpus == 32
    assert hw.host_nbytes_per_rank == 128 * GIB


# spelling -> pieces that the message must hold
REFUSALS = [
    ("", ["unknown GPU ''", "Grammar"]),
    (
        "v10-240g",
        ["unknown GPU 'v10'", "did you mean 'v100'?", "rtx5090 (32g)", "a100pcie (40g/80g)", "yard-120", "auto"],
    ),
    ("superpot", ["did you mean 'superpod'?"]),
    ("mi300-240g", ["unknown GPU 'mi300'", "emulated", "sm<NN>"]),
    ("v100", ["host memory is needed", "found 0 sizes", "for example v100-64g"]),
    ("emulated", ["found 0 sizes", "for example emulated-64m-2g"]),
    ("v100-1g-2g-3g", ["found 3 sizes"]),
    ("v100-240", ["'240' is no size", "<number>(k|m|g)", "512m"]),
    ("v100-240gb", ["'240gb' is no size"]),
    ("v100--240g", ["'' is no size"]),
    ("v100-0g", ["'0g' is 0 bytes", "at least 1 byte"]),
    ("v100-0.0000000001k", ["is 0 bytes"]),
    ("v100-9999999999g", ["at most 1152921504606846976"]),
    ("v100-32g", ["'v100-32g-<host_memory>'", "'v100-32g-240g'", "'v100-32g-32g'"]),
    ("v100-16g", ["'v100-16g-<host_memory>'", "'v100-32g-16g'"]),
    ("8XV100-16384M", ["'8xv100-16384m-<host_memory>'", "'8xv100-32g-16384m'"]),
    ("4090-24g", ["'4090-24g-<host_memory>'", "'4090-24g-24g'"]),
    ("rtx2060-8g", ["'rtx2060-8g-<host_memory>'", "'rtx2060-6g-8g'"]),
    ("v100-64g-240g", ["no v100 has 64g of memory", "16g, 32g"]),
    ("emulated-2g", ["emulated has no default memory", "emulated-64m-2g"]),
    ("sm86-32g", ["sm86 has no default memory"]),
    ("0xv100-240g", ["at most <nodes>x<gpus>x", "at least 1"]),
    ("1x2x3xv100-240g", ["at most <nodes>x<gpus>x"]),
    ("4xsuperpod", ["'superpod' is a whole machine and takes no count", "'4x8xa100-40g-1024g'"]),
    ("2xyard-120", ["'yard-120' is a whole machine", "'2x8xv100-32g-120g'"]),
    ("-2xv100-240g", ["unknown GPU ''"]),
    ("٣xv100-240g", ["unknown GPU"]),
]


@pytest.mark.parametrize(("text", "pieces"), REFUSALS)
def test_refusal(text: str, pieces: list[str]) -> None:
    with pytest.raises(HardwareError) as refusal:
        Hardware.parse(text)
    message = str(refusal.value)
    assert isinstance(refusal.value, ChunkcError)
    assert isinstance(refusal.value, ValueError)
    assert [piece for piece in [f"hw={text!r}", *pieces] if piece not in message] == []


@pytest.mark.parametrize("text", ["v100-32g", "8xv100-16g", "4090-24g", "t4-16g", "a100-40g", "h200-141g", "b200-192g"])
def test_both_spellings_of_an_ambiguous_one_parse(text: str) -> None:
    with pytest.raises(HardwareError) as refusal:
        Hardware.parse(text)
    as_gpu, as_host = re.findall(r"(?:example|host write) '([^']+)'", str(refusal.value))
    nbytes = parse_size(text.rsplit("-", 1)[1])
    assert Hardware.parse(as_gpu).gpu_memory_nbytes == nbytes
    assert Hardware.parse(as_host).host_memory_nbytes == nbytes


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(spelling) == (0, 3)
