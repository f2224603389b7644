"""Signals between two steps: noted, never in the middle of anything, and everything as before afterwards."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import chunkc
from chunkc.checkpoint import directory as folders


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


def test_the_step_is_finished_and_the_code_is_that_of_the_signal() -> None:
    done = []
    with pytest.raises(SystemExit) as ended, chunkc.graceful_exit() as stop:
        for step in range(5):
            assert not stop
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            done.append(step)
            if stop:
                break
    assert done == [0, 1, 2] and ended.value.code == 143 == stop.exit_code


def test_without_a_signal_nothing_happens() -> None:
    with chunkc.graceful_exit() as stop:
        assert not stop and stop.exit_code == 0


def test_the_first_of_several_signals_counts() -> None:
    with pytest.raises(SystemExit) as ended, chunkc.graceful_exit(signal.SIGUSR1, signal.SIGTERM) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_number == signal.SIGUSR1
    assert ended.value.code == 128 + signal.SIGUSR1


def test_an_exception_goes_on_and_a_block_may_nest() -> None:
    with pytest.raises(ZeroDivisionError), chunkc.graceful_exit() as outer:
        with pytest.raises(SystemExit), chunkc.graceful_exit() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert inner and not outer
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError


def test_it_belongs_to_the_main_thread() -> None:
    found: list[BaseException] = []

    def enter() -> None:
        try:
            with chunkc.graceful_exit():
                pass
        except chunkc.ChunkcError as error:
            found.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread only" in str(found[0])


def test_a_forked_child_ends_as_usual() -> None:
    ready, started = os.pipe()
    with chunkc.graceful_exit() as stop:
        pid = os.fork()
        if pid == 0:
            os.write(started, b".")  # Python forgets signals that come before a fork has set its child up
            signal.pause()
            os._exit(0)
        os.read(ready, 1)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
        assert not stop
    os.close(ready)
    os.close(started)


STOPPED = """
import os, signal, sys
import torch
import chunkc

model = chunkc.compile(torch.nn.Linear(8, 8), "emulated-96k-16m", dtype=torch.float32, backend="eager")
optimizer = chunkc.AdamW(model.parameters())
with chunkc.graceful_exit() as stop:
    for step in range(5):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if stop:
            chunkc.save_checkpoint(sys.argv[1], model, optimizer, asynchronous=True)
            break
"""


@pytest.mark.long
def test_a_process_ends_with_the_documented_code_when_its_save_is_whole(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", STOPPED, tmp_path], timeout=120, check=False)
    assert done.returncode == 143
    [path] = folders.checkpoints(tmp_path)
    assert folders.newest(tmp_path) == path and folders.verify(path).step == 2
