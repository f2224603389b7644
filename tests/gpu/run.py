"""Run the tests of the GPU in the order of what they tell, and keep each result the moment it is there.

    python tests/gpu/run.py --out FOLDER [--limit-s 540] [--jobs 3] [--stand-in double]

Files begin in the order of `FILES`, each in a process of its own that has so many seconds at most, and ``--jobs`` of
them run at the same time. Those of `ALONE` follow, one by one. FOLDER/suite.jsonl gets a line for the machine, for each
test that begins and for each that ends (`journal`), so that a run which is killed keeps what it found; FOLDER/races.log
gets what pytest prints about the file ``races``. Failures are printed when they happen.

A process that ends in the middle (a crash, a GPU that is lost) or stands still for ``--still-s`` seconds costs one
test: it is recorded with the stacks of its threads, and a new process goes on with the next. Files for which no time is
left are recorded as not run.

Processes get ``TORCHINDUCTOR_VEC_ISA_OK=1``: Inductor then takes the vector instructions that the processor names,
without the programs that it compiles and runs to try them, which cost each process up to 40 seconds.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import provenance  # noqa: E402
from children import PYTHON, Child  # noqa: E402
from journal import Journal, Record, records  # noqa: E402

FILES: dict[str, float] = {
    "unknowns": 180, "kernels": 90, "semantics": 300, "steady_state": 150, "races": 120, "placement": 180,
    "memory": 240, "moved_values": 120, "attention": 60, "clipping": 60, "layouts": 120, "managed": 90,
    "real_size": 240, "named": 240, "launch": 60, "calibrate": 90,
}  # fmt: skip
"""Stems of files, most telling first, and the seconds that each may take."""
ALONE = ("real_size", "named", "launch", "calibrate")
"""They name the memory of the whole GPU, of which other processes take some, or read rates and times."""
MANY_CORES, JOBS_OF_MANY_CORES = 8, 3
OTHER_FILE_S = 60.0
MIN_S = 5.0
PRINTED_CHARS = 1500  # of a failure
ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_WAIT_POLICY": "passive", "TORCHINDUCTOR_VEC_ISA_OK": "1",
}  # fmt: skip
BAD = ("failed", "crashed", "stood still", "out of time")


class Interrupted(Exception):
    """The run ended while a file was under way."""


@dataclass(slots=True)
class Progress:
    """What the journal says of one file; a test stands still after ``still_s`` without a beginning or an end.

    Attributes:
        num_read, size_nbytes: records that were taken in, and the journal's size then.
        running: the test that runs now, and since_s: when something last began or ended.
        is_collected: whether the present process has said what it is to run.
    """

    file: str
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
        size_nbytes = self.journal.path.stat().st_size
        if size_nbytes == self.size_nbytes:
            return
        found = records(self.journal.path)
        for record in found[self.num_read :]:
            if record.get("file") == self.file:
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
        self.read()
        return time.monotonic() - self.since_s < self.still_s

    def begin_process(self) -> None:
        self.read()
        self.running, self.is_collected, self.num_begun, self.since_s = None, False, 0, time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """Run all files, or as a child one, and return the exit code: 1 where a test failed or was not run."""
    args = parse(argv)
    path = args.out / "suite.jsonl"
    if args.child is not None:
        return run_here(args, Journal(path, file=args.child))
    deadline_s, journal = time.monotonic() + args.limit_s, Journal(path)
    path.unlink(missing_ok=True)
    journal.write("run", **provenance.describe(args.commit), stand_in=args.stand_in, jobs=args.jobs)
    total = run_files(args.only.split(",") if args.only else list(FILES), args, deadline_s)
    journal.write("end", outcomes=dict(total))
    say(f"{counted(total)}; written to {path}")
    return 0 if not any(total[kind] for kind in (*BAD, "not run")) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The tests of the GPU, one process a file.")
    default_jobs = JOBS_OF_MANY_CORES if len(os.sched_getaffinity(0)) >= MANY_CORES else 1
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all files together")
    parser.add_argument("--jobs", type=int, default=default_jobs, help="files at the same time (here: %(default)s)")
    parser.add_argument("--stand-in", choices=("double", "emulated"), help="what to run on without a GPU")
    parser.add_argument("--only", help=f"files, by commas: {', '.join(FILES)}")
    parser.add_argument("--tests", type=Path, default=Path(__file__).parent, help="folder of test_..._gpu.py")
    parser.add_argument("--file-s", type=float, help="seconds for each file, in place of those of FILES")
    parser.add_argument("--still-s", type=float, default=140.0, help="seconds that a test may stand still")
    parser.add_argument("--commit", help="of this checkout, where it came without git's data")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_files(stems: Sequence[str], args: argparse.Namespace, deadline_s: float) -> Counter[str]:
    is_over, pool = threading.Event(), ThreadPoolExecutor(args.jobs)
    try:
        together = [pool.submit(run_file, s, args, deadline_s, is_over) for s in stems if s not in ALONE]
        found = [future.result() for future in together]
        found += [run_file(stem, args, deadline_s, is_over) for stem in stems if stem in ALONE]
    finally:
        is_over.set()
        pool.shutdown(cancel_futures=True)
    return sum(found, Counter[str]())


def run_file(stem: str, args: argparse.Namespace, deadline_s: float, is_over: threading.Event) -> Counter[str]:
    started_s = time.monotonic()
    progress = Progress(stem, Journal(args.out / "suite.jsonl", file=stem), args.still_s)
    end_s = min(deadline_s, started_s + (args.file_s or FILES.get(stem, OTHER_FILE_S)))
    is_whole = False
    while not is_whole and (left_s := end_s - time.monotonic()) > MIN_S:
        is_whole = run_process(args, progress, left_s, is_over)
        if not progress.num_begun:  # another process would do no more
            break
    if not is_whole:
        missing = sorted(progress.left)
        progress.outcomes["not run"] += max(1, len(missing))
        progress.journal.write("not run", tests=missing)
    progress.journal.write("file", seconds=round(time.monotonic() - started_s, 1), **progress.outcomes)
    say(f"{stem:14} {counted(progress.outcomes)} in {time.monotonic() - started_s:.0f} s")
    return progress.outcomes


def run_process(args: argparse.Namespace, progress: Progress, limit_s: float, is_over: threading.Event) -> bool:
    options = ["--out", str(args.out), "--tests", str(args.tests), "--child", progress.file]
    options += ["--stand-in", args.stand_in] if args.stand_in else []
    env = {**os.environ, **ENVIRONMENT}
    progress.begin_process()
    child = Child([*PYTHON, __file__, *options], env, args.out / f"{progress.file}.log")
    progress.journal.write("process", pid=child.process.pid)
    try:
        code = child.wait(limit_s, lambda: not is_over.is_set() and progress.is_moving())
    finally:
        child.end(is_aborted=True)
    if is_over.is_set():
        raise Interrupted
    progress.read()
    if progress.running is not None:
        is_late = code is None and child.seconds >= limit_s
        outcome = "out of time" if is_late else "stood still" if code is None else "crashed"
        text = f"exit code {code} after {child.seconds:.0f} s\n{child.last_words(8000)}"
        progress.journal.write("test", test=progress.running, outcome=outcome, text=text)
        progress.read()
    elif not progress.is_collected:
        text = f"exit code {code} before any test\n{child.last_words(8000)}"
        progress.journal.write("test", test=progress.file, outcome="crashed", text=text)
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
    text = record["text"]
    part = text[-PRINTED_CHARS:] if record["outcome"] == "failed" else text[:PRINTED_CHARS]
    say(f"{record['outcome'].upper()} {record['test']}\n{part}\n")


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)


def counted(outcomes: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())) or "nothing"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    sys.exit(main())
