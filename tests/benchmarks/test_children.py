"""Child processes of the GPU's benchmark and suite: they end with all they started, and say where they were."""

import os
import time
from pathlib import Path

from children import PYTHON, Child

SLEEPS = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(other.pid, flush=True)
def stand_still():
    time.sleep(60)
stand_still()
"""


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_one_that_stands_still_ends_with_its_children_and_its_stack(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("earlier\n")
    child = Child([*PYTHON, "-c", SLEEPS], dict(os.environ), log)
    deadline_s = time.monotonic() + 30
    while not child.last_words().strip().isdigit() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    other = int(child.last_words())
    assert child.wait(0.2) is None and child.wait(30.0, lambda: False) is None and is_alive(other)
    child.end(is_aborted=True)
    assert "in stand_still" in child.last_words() and "earlier" not in child.last_words()
    deadline_s = time.monotonic() + 30
    while is_alive(other) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_alive(other)


def test_exit_codes_and_output(tmp_path: Path) -> None:
    ends = {0: "pass", 3: "sys.exit(3)", -9: "os.kill(os.getpid(), 9)"}
    for code, end in ends.items():
        child = Child(
            [*PYTHON, "-c", f"import os, sys; print('said', flush=True); {end}"], dict(os.environ), tmp_path / "log"
        )
        assert child.wait(30.0) == code and child.last_words() == "said\n"
        child.end()
