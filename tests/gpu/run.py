"""Run the tests of the GPU in the order of what they tell, and keep each result the moment it is there.

    python tests/gpu/run.py --out FOLDER [--limit-s 540] [--stand-in double]

Files run in the order of `FILES`, each in a process of its own that has so many seconds at most. FOLDER/suite.jsonl
gets a line for the machine, for each test that begins and for each that ends (`journal`), so that a run which is killed
keeps what it found; FOLDER/suite.log gets what pytest prints. Failures are printed when they happen.

A process that ends in the middle (a crash, a GPU that is lost) or stands still for ``--still-s`` seconds costs one
test: it is recorded with the stacks of its threads, and a new process goes on with the next. Files for which no time is
left are recorded as not run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import provenance  # noqa: E402
from children import PYTHON, Child  # noqa: E402
from journal import Journal, Record, records  # noqa: E402

FILES: dict[str, float] = {
    "unknowns": 90, "launch": 60, "kernels": 90, "semantics": 180, "steady_state": 60, "races": 90, "placement": 120,
    "memory": 200, "real_size": 180, "clipping": 45, "managed": 60, "calibrate": 60,
}  # fmt: skip
"""Stems of files, most telling first, and the seconds that each may take."""
OTHER_FILE_S = 60.0
MIN_S = 5.0
PRINTED_CHARS = 1500  # of a failure
BAD = ("failed", "crashed", "stood still", "out of time")


@dataclass(slots=True)
class Progress:
    """What the journal says of the file that runs now.

    Attributes:
        still_s: seconds without a beginning or an end after which a test stands still.
        num_read, size_nbytes: records that were taken in, and the journal's size then.
        num_begun: tests that the present process has begun.
        running: the test that runs now, and since_s: when something last began or ended.
        is_collected: whether the present process has said what it is to run.
        left: tests that were not begun.
        outcomes: of the file.
    """

    journal: Journal
    still_s: float
    num_read: int = 0
    size_nbytes: int = 0
    num_begun: int = 0
    running: str | None = None
    since_s: float = field(default_factory=time.monotonic)
    is_collected: bool = False
    left: set[str] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)

    def read(self) -> None:
        """Take in, and print, what is new."""
        size_nbytes = self.journal.path.stat().st_size
        if size_nbytes == self.size_nbytes:
            return
        found = records(self.journal.path)
        for record in found[self.num_read :]:
            self._take(record)
        self.num_read, self.size_nbytes = len(found), size_nbytes

    def _take(self, record: Record) -> None:
        kind, test = record["kind"], record.get("test")
        if kind in ("collected", "start", "test"):
            self.since_s = time.monotonic()
        if kind == "collected":
            self.left, self.is_collected = set(record["tests"]), True
        elif kind == "start":
            self.running, self.num_begun = test, self.num_begun + 1
            self.left.discard(str(test))
        elif kind == "test":
            self.running = None
            self.outcomes[record["outcome"]] += 1
            if record["outcome"] in BAD:
                show(record)

    def is_moving(self) -> bool:
        """Whether something began or ended lately."""
        self.read()
        return time.monotonic() - self.since_s < self.still_s

    def begin_process(self) -> None:
        """A new process collects first."""
        self.read()
        self.running, self.is_collected, self.num_begun, self.since_s = None, False, 0, time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """Run all files, or as a child one, and return the exit code: 1 where a test failed or was not run."""
    args = parse(argv)
    journal = Journal(args.out / "suite.jsonl")
    if args.child is not None:
        return run_here(args, journal)
    deadline_s = time.monotonic() + args.limit_s
    journal.path.unlink(missing_ok=True)
    journal.write("run", **provenance.describe(args.commit), stand_in=args.stand_in)
    progress, outcomes = Progress(journal, args.still_s), {}
    for stem in args.only.split(",") if args.only else FILES:
        outcomes[stem] = run_file(stem, args, progress, deadline_s)
    total = sum(outcomes.values(), Counter[str]())
    journal.write("end", outcomes=dict(total))
    print(f"{counted(total)}; written to {journal.path}", flush=True)
    return 0 if not any(total[kind] for kind in (*BAD, "not run")) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The tests of the GPU, one process a file.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all files together")
    parser.add_argument("--stand-in", choices=("double", "emulated"), help="what to run on without a GPU")
    parser.add_argument("--only", help=f"files, by commas: {', '.join(FILES)}")
    parser.add_argument("--tests", type=Path, default=Path(__file__).parent, help="folder of test_..._gpu.py")
    parser.add_argument("--file-s", type=float, help="seconds for each file, in place of those of FILES")
    parser.add_argument("--still-s", type=float, default=140.0, help="seconds that a test may stand still")
    parser.add_argument("--commit", help="of this checkout, where it came without git's data")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_file(stem: str, args: argparse.Namespace, progress: Progress, deadline_s: float) -> Counter[str]:
    """Outcomes of one file, by as many processes as it takes."""
    started_s = time.monotonic()
    progress.outcomes, progress.left = Counter(), set()
    end_s = min(deadline_s, started_s + (args.file_s or FILES.get(stem, OTHER_FILE_S)))
    is_whole = False
    while not is_whole and (left_s := end_s - time.monotonic()) > MIN_S:
        is_whole = run_process(stem, args, progress, left_s)
        if not progress.num_begun:  # another process would do no more
            break
    if not is_whole:
        missing = sorted(progress.left)
        progress.outcomes["not run"] += max(1, len(missing))
        progress.journal.write("not run", file=stem, tests=missing)
    progress.journal.write("file", file=stem, seconds=round(time.monotonic() - started_s, 1), **progress.outcomes)
    print(f"{stem:14} {counted(progress.outcomes)} in {time.monotonic() - started_s:.0f} s", flush=True)
    return progress.outcomes


def run_process(stem: str, args: argparse.Namespace, progress: Progress, limit_s: float) -> bool:
    """Go on with one file in a new process; whether all of its tests have had their turn."""
    options = ["--out", str(args.out), "--tests", str(args.tests), "--child", stem]
    options += ["--stand-in", args.stand_in] if args.stand_in else []
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_WAIT_POLICY": "passive"}
    progress.begin_process()
    child = Child([*PYTHON, __file__, *options], env, args.out / "suite.log")
    progress.journal.write("process", file=stem, pid=child.process.pid)
    try:
        code = child.wait(limit_s, progress.is_moving)
    finally:
        child.end(is_aborted=True)
    progress.read()
    if progress.running is not None:
        is_late = code is None and child.seconds >= limit_s
        outcome = "out of time" if is_late else "stood still" if code is None else "crashed"
        text = f"exit code {code} after {child.seconds:.0f} s\n{child.last_words(8000)}"
        progress.journal.write("test", test=progress.running, outcome=outcome, text=text)
        progress.read()
    elif not progress.is_collected:
        text = f"exit code {code} before any test\n{child.last_words(8000)}"
        progress.journal.write("test", test=stem, outcome="crashed", text=text)
        progress.read()
    return progress.is_collected and not progress.left


def run_here(args: argparse.Namespace, journal: Journal) -> int:
    """The child: pytest on one file. Plugins of pytest, which other machines have or lack, take no part."""
    import pytest
    from recorder import Recorder

    path = args.tests / f"test_{args.child}_gpu.py"
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(args.tests), "--confcutdir", str(ROOT)]
    options += ["-p", "no:cacheprovider", "-m", "gpu", "-q"]
    options += ["--stand-in", args.stand_in] if args.stand_in else []
    return int(pytest.main([*options, str(path)], plugins=[Recorder(journal)]))


def show(record: Record) -> None:
    """A failure, for the terminal: the end of pytest's text, or the beginning of stacks."""
    text = record["text"]
    part = text[-PRINTED_CHARS:] if record["outcome"] == "failed" else text[:PRINTED_CHARS]
    print(f"{record['outcome'].upper()} {record['test']}\n{part}\n", flush=True)


def counted(outcomes: Counter[str]) -> str:
    """``12 passed, 1 failed``."""
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())) or "nothing"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    sys.exit(main())
