"""Least budgets: the search finds what planning accepts, and two results become a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import chunkc

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
MIB = 2**20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import least_budgets

    yield least_budgets
    for name in ("least_budgets", "least_budget_models"):
        sys.modules.pop(name, None)


def test_twelve_models_have_1024_tokens_and_a_llama_has_8192(script: ModuleType) -> None:
    assert sorted(model.length for model in script.ALL) == [1024] * 12 + [8192]
    assert len(script.BY_NAME) == 13
    for name in ("GPT-2", "BERT", "T5", "OPT"):
        config = script.BY_NAME[name].build().config
        rates = [getattr(config, key, 0.0) for key in ("resid_pdrop", "hidden_dropout_prob", "dropout_rate", "dropout")]
        assert max(rates) == 0.1, name


@pytest.mark.parametrize(("named_mib", "least_mib"), ((300, 300), (300, 211), (3, 2)))
def test_the_search_finds_the_least_accepted_budget(
    named_mib: int, least_mib: int, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a refusal names more than the least: to 2 %, and with one more plan where it names the least."""
    tried = list[int]()

    def planned(model: Any, nbytes: int, backend: str) -> chunkc.BudgetError | None:
        tried.append(nbytes)
        error = chunkc.BudgetError(
            "", moment="bwd.0", tensors=(), missing_nbytes=1, min_device_nbytes=named_mib * MIB, min_host_nbytes=0
        )
        return error if nbytes < least_mib * MIB else None

    monkeypatch.setattr(script, "planned", planned)
    named = script.named_nbytes(script.ALL[0], "eager")
    found = script.least_nbytes(script.ALL[0], named, "eager")
    assert least_mib * MIB <= found <= least_mib * MIB / (1 - script.PRECISION) + 1
    assert any(found * (1 - script.PRECISION) - 1 <= nbytes < least_mib * MIB for nbytes in tried)
    assert len(tried) == 2 or named_mib > least_mib


def test_two_results_become_a_table(script: ModuleType) -> None:
    def result(*mib: int) -> dict[str, Any]:
        sizes = {"measured_peak_nbytes": MIB, "model_data_nbytes": 2 * MIB}
        lengths = (1024, 1024, 1024, 8192)
        rows = [
            {"model": f"m{i}", "what": "w", "length": length, "least_nbytes": n * MIB, **sizes}
            for i, (n, length) in enumerate(zip(mib, lengths, strict=True))
        ]
        return {"commit": "c", "models": rows}

    joined = script.joined(result(100, 100, 100, 100), result(10, 50, 90, 95))
    assert (joined["median_ratio"], joined["largest_ratio"]) == (0.5, 0.95)
    assert joined["before"] == joined["after"] == {"commit": "c"}
    table = script.table(joined)
    assert [line.split("|")[5].strip() for line in table.splitlines()[2:]] == ["0.10", "0.50", "0.90", "0.95"]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["m0", "m1", "m2", "m3"]


def test_named_models_train_under_their_named_budgets(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = list[tuple[str, int, str]]()

    def train_a_step(model: Any, nbytes: int, backend: str) -> dict[str, Any]:
        trained.append((model.name, nbytes, backend))
        return {"measured_peak_nbytes": MIB, "fits": True}

    monkeypatch.setattr(script, "train_a_step", train_a_step)
    rest = {"what": "", "length": 1024, "backend": "eager"}
    named = [{"model": name, "least_nbytes": n, **rest} for n, name in enumerate(("OPT", "Llama"), 5)]
    after = script.with_steps({"commit": "c", "models": named}, ["Llama"], {"commit": "d"})
    assert trained == [("Llama", 6, "eager")]
    assert after["models"] == [named[0], {**named[1], "measured_peak_nbytes": MIB, "fits": True}]
    joined = script.joined({"commit": "b", "models": named}, after)
    assert (joined["before"], joined["after"], joined["steps"]) == ({"commit": "b"}, {"commit": "c"}, {"commit": "d"})
    with pytest.raises(SystemExit):
        script.main(["--steps-of", "OPT", "--out", "unwritten.json"])


def test_the_page_and_the_changelog_say_what_the_result_says(script: ModuleType) -> None:
    """The result is what the script joins, the page has its table, and both texts have its median."""
    [path] = (BENCHMARKS / "results").glob("least_budgets-*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    before, after = (
        {**result[when], "models": [row[when] for row in result["models"]]} for when in ("before", "after")
    )
    assert script.joined(before, {**after, "steps": result["steps"]}) == result
    page = script.PAGE.read_text(encoding="utf-8")
    assert page.partition(script.BEGIN)[2].partition(script.END)[0] == script.table(result)
    median = f"{result['median_ratio']:.2f}"
    assert f"The median of the twelve at 1,024 tokens is {median}." in page
    assert f"({median} times in the median at 1,024 tokens:" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    ran = [row["after"] for row in result["models"] if "measured_peak_nbytes" in row["after"]]
    assert ran and all(r["fits"] == (r["measured_peak_nbytes"] <= r["planned_peak_nbytes"]) for r in ran)
