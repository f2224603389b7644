"""The page of Megatron-LM's figures is current: its inputs, every row, and the arithmetic behind the plans."""

import megatron
import pytest
from megatron import Row

from chunkc.cost.pipeline import StageTimes


def lines() -> list[str]:
    page: str = megatron.PAGE.read_text()
    return page.splitlines()


def row_of(name: str) -> Row:
    return next(row for row in megatron.rows_of(megatron.load()) if row.name == name)


def test_the_page_knows_its_inputs() -> None:
    assert f"<!-- megatron.toml: {megatron.digest()} -->" in lines()


def test_no_row_is_dropped() -> None:
    rows = megatron.rows_of(megatron.load())
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines() if "B |" in line]
    assert [(c[0], c[4], c[-1]) for c in cells] == [
        (r.name, f"{r.tflops:g}", "fitted" if r.fitted else "") for r in rows
    ]
    assert len(rows) == 10 and [r.name for r in rows if r.fitted] == ["1.7B", "18.4B", "145.6B"]


def test_the_median_is_of_the_rows_that_were_not_fitted() -> None:
    errors = sorted(
        abs(float(line.split("|")[7].strip(" %"))) for line in lines() if "B |" in line and "fitted" not in line
    )
    stated = next(line for line in lines() if line.startswith("**Median error"))
    assert len(errors) == 7 and f" {errors[3]:.1f} %" in stated
    assert errors[3] <= 15


@pytest.mark.parametrize(("name", "petaflops"), [("1.7B", 4.4), ("39.1B", 70.8), ("1008.0B", 502.0)])
def test_rows_have_the_figures_of_the_paper(name: str, petaflops: float) -> None:
    """Its last column: of all GPUs together. Ranks divide the GPUs, and micro-batches the sequences."""
    row = row_of(name)
    assert row.tflops * row.num_gpus / 1e3 == pytest.approx(petaflops, rel=0.01)
    assert row.num_replicas * row.num_tensor * row.num_stages == row.num_gpus
    assert row.batch % row.num_replicas == 0 and row.num_layers % row.num_stages == 0


def test_operations_are_those_of_layers_and_head() -> None:
    """Four times a forward of 24 s h^2 + 4 s^2 h operations a layer; three times 2 s h V for the head."""
    row, vocabulary, sequence = row_of("76.1B"), 51200, 2048
    layers = 24 * sequence * row.width**2 + 4 * sequence**2 * row.width
    head = 2 * sequence * row.width * vocabulary
    assert row.flops(vocabulary, sequence) == pytest.approx(row.batch * (4 * row.num_layers * layers + 3 * head))


def test_the_last_stage_has_what_is_no_layer() -> None:
    """Two layers take 5 ms and four 9: a layer takes 2, and the rest 1."""
    shallow, deeper = StageTimes(5, 10, 1), StageTimes(9, 18, 1)
    stages = megatron.stages_of(row_of("39.1B"), 4, shallow, deeper)
    assert stages == [StageTimes(24, 48, 0)] * 3 + [StageTimes(25, 50, 1)]


def test_all_replicas_exchange_gradients() -> None:
    """By a ring over nodes for each GPU of a node where ``tp`` fills it; less where replicas share a node."""
    vocabulary = megatron.load()["vocabulary"]
    rows = megatron.rows_of(megatron.load())
    assert all(row.num_replicas > 1 and megatron.exchange_ms(row, vocabulary) > 0 for row in rows)
    row = row_of("18.4B")
    nbytes = 2 * (12 * row.width**2 * row.num_layers + vocabulary * row.width) / 8
    wire_ms = 2 * (row.num_replicas - 1) / row.num_replicas * nbytes / (megatron.network_gb_per_s() * 1e6)
    assert megatron.exchange_ms(row, vocabulary) == pytest.approx(wire_ms, rel=0.02)
    assert megatron.exchange_ms(row_of("1.7B"), vocabulary) < wire_ms / 10


def test_stages_on_a_rank() -> None:
    data = megatron.load()
    assert megatron.chunks_of(data, row_of("18.4B"), 32) == [1], "no pipeline"
    assert megatron.chunks_of(data, row_of("310.1B"), 144) == [1, 2, 3]
    assert megatron.chunks_of(data, row_of("310.1B"), 72) == [1], "no whole rounds"
    assert megatron.chunks_of(data, row_of("1008.0B"), 512) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1.7B", "145.6B"])
def test_a_row_is_predicted_again(name: str) -> None:
    stated = next(line for line in lines() if line.startswith(f"| {name} |"))
    assert megatron.line_of(megatron.predict(megatron.load(), row_of(name))) == stated
