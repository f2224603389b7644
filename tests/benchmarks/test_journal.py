"""Journals: whatever was written before a kill is read again."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from journal import Journal, records


def test_records_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.jsonl"
    assert records(path) == []
    journal = Journal(path)
    written = [journal.write("one", text="two\nlines, é", values=[1, 2.5, None]), journal.write("two", path=str(path))]
    assert records(path) == written and written[0]["kind"] == "one" and written[0]["at_s"] > 1e9


def test_a_line_that_was_cut_costs_itself_only(tmp_path: Path) -> None:
    """At every length, and with another writer behind it."""
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


def test_writers_at_the_same_time_keep_their_lines_whole(tmp_path: Path) -> None:
    path, num_lines = tmp_path / "results.jsonl", 20

    def write(writer: int) -> None:
        journal = Journal(path, file=f"writer {writer}")
        for number in range(num_lines):
            journal.write("line", number=number, text=f"{writer}" * 30_000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [json.loads(line) for line in path.read_text().splitlines()] == records(path)
    for writer in range(4):
        found = [r for r in records(path) if r["file"] == f"writer {writer}"]
        assert [r["number"] for r in found] == list(range(num_lines))
        assert all(r["text"] == f"{writer}" * 30_000 for r in found)
