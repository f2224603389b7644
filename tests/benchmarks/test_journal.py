"""Journals: whatever was written before a kill is read again."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


def test_records_are_read_as_written(tmp_path: Path) -> None:
    from journal import Journal, records

    path = tmp_path / "folder" / "results.jsonl"
    assert records(path) == []
    journal = Journal(path)
    written = [journal.write("one", text="two\nlines, é", values=[1, 2.5, None]), journal.write("two", path=str(path))]
    assert records(path) == written and written[0]["kind"] == "one" and written[0]["at_s"] > 1e9


def test_a_line_that_was_cut_costs_itself_only(tmp_path: Path) -> None:
    """At every length, and with another writer behind it."""
    from journal import Journal, records

    path = tmp_path / "results.jsonl"
    journal = Journal(path)
    first = journal.write("first", value="é" * 3)
    start = path.stat().st_size
    second = journal.write("second", value="é" * 3)
    whole = path.read_bytes()
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        complete = [first, second] if end == len(whole) - 1 else [first]
        assert records(path) == complete
        assert [*records(path), Journal(path).write("third")] == records(path)
