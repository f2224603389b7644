"""What all tests share: which are skipped here and why, how many cases hypothesis tries, and which warnings are errors.

torch and hypothesis are imported inside hooks: what is imported while conftest files are loaded already meets the rule
that a warning is an error, which holds for the versions in constraints.txt only. A machine with a GPU has others.
"""

import gc
import importlib.util
import os
import signal
from collections import Counter
from itertools import chain

import pytest

NUM_SLOWEST = 20


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--long", action="store_true", help="run tests that take several seconds too, as CI does")
    parser.addoption("--soak", action="store_true", help="run full counts: tests marked slow, 2000 hypothesis examples")
    parser.addoption(
        "--stand-in",
        choices=("emulated", "double"),
        help="run tests marked gpu without a GPU: on the emulated device, or on CUDA's over a double of CUDA",
    )
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for a test; without effect, as pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    import torch

    os.environ.setdefault("CHUNKC_CACHE", "0")  # tests change the planner in ways that no key tells
    gc.set_threshold(50_000, 20, 20)  # captured graphs are millions of objects: a tenth of all time goes to collections
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    if importlib.util.find_spec("hypothesis") is not None:  # tests of the GPU take none of it
        _choose_profile("soak" if config.getoption("--soak") else "test")
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: without effect, as pytest-timeout is not installed")
    if torch.cuda.is_available():
        config.addinivalue_line("filterwarnings", "default")


def _choose_profile(name: str) -> None:
    """How many cases hypothesis tries."""
    from hypothesis import settings

    settings.register_profile("test", deadline=None, max_examples=30, derandomize=True)
    settings.register_profile("soak", deadline=None, max_examples=2000)
    settings.load_profile(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason that `make test` prints, what this machine or this run cannot do."""
    import torch

    absent = {}
    if not config.getoption("--soak"):
        absent["slow"] = "slow: runs with --soak (make soak)"
        if not config.getoption("--long"):
            absent["long"] = "long: runs with --long (make test TEST_ARGS=--long)"
    if not torch.cuda.is_available() and config.getoption("--stand-in") is None:
        absent["gpu"] = "gpu: no CUDA device is available"
    if not torch.distributed.is_available() or os.name != "posix":
        absent["distributed"] = "distributed: torch.distributed is not available"
    for item in items:
        for marker, reason in absent.items():
            mark = item.get_closest_marker(marker)
            if mark is not None and not _is_case(item, mark.kwargs.get("but")):
                item.add_marker(pytest.mark.skip(reason=reason))


def _is_case(item: pytest.Item, case: str | None) -> bool:
    """Whether ``item`` is the ``case`` of a parametrized test that a mark leaves out."""
    return case is not None and item.name.endswith(f"[{case}]")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported out of every later collection: tests ask for some 1,500, each over all live objects."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the files that took longest, where whole folders ran."""
    durations_s: Counter[str] = Counter()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            durations_s[report.nodeid.partition("::")[0]] += report.duration
    if len(durations_s) > NUM_SLOWEST:
        terminalreporter.section(f"{NUM_SLOWEST} slowest files, {durations_s.total():.0f} s in all")
        for name, duration_s in durations_s.most_common(NUM_SLOWEST):
            terminalreporter.line(f"{duration_s:7.1f} s  {name}")


def pytest_unconfigure() -> None:
    """Libraries that count what is left at the end count no frozen objects."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def earlier_files_are_collected_no_more() -> None:
    """What they keep, captured graphs and compiled code, are millions of objects: seconds for each later collection."""
    gc.collect()
    gc.freeze()
