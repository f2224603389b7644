"""A pytest plugin that writes each test's start and result into a journal, and leaves a process whose GPU is lost.

Tests that an earlier process of the same run began are left out. After a failure the GPU is asked for a sign of life.
"""

import sys
from typing import Any

import pytest
from journal import Journal, records

MAX_CHARS = 12_000  # of a failure's text in the journal; its end says most


class Recorder:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._begun = {record["test"] for record in records(journal.path) if record["kind"] == "start"}
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what was begun before; only then say which tests are to be run."""
        begun = [item for item in items if item.nodeid in self._begun]
        items[:] = [item for item in items if item.nodeid not in self._begun]
        config.hook.pytest_deselected(items=begun)
        self._journal.write("collected", tests=[item.nodeid for item in items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read has no tests to tell of it."""
        if report.failed:
            self._journal.write("test", test=report.nodeid, outcome="failed", text=str(report.longrepr)[-MAX_CHARS:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        self._journal.write("start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The worst of setup, call and teardown is the test's outcome."""
        by_outcome = {report.outcome: report for report in self._reports}
        worst = next(outcome for outcome in ("failed", "skipped", "passed") if outcome in by_outcome)
        self._journal.write(
            "test",
            test=nodeid,
            outcome=worst,
            seconds=round(sum(report.duration for report in self._reports), 2),
            readings={str(name): value for report in self._reports[-1:] for name, value in report.user_properties},
            **({} if worst == "passed" else {"text": _text(by_outcome[worst])[-MAX_CHARS:]}),
        )

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception) and not _gpu_answers():
            item.session.shouldstop = "the GPU answers this process no more"


def _text(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return report.longreprtext


def _gpu_answers() -> bool:
    """Whether CUDA still works in this process; yes where it was never used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
