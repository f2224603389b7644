"""Segments compiled beside: each comes back once whatever helpers do, and what they compiled is in the cache."""

import os
import select
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc._torch_compat import compile_helpers
from chunkc._torch_compat.compile_helpers import CompileHelpers, num_helpers

READ = "import sys\nsys.stdout.write('.'); sys.stdout.flush()\nhead = sys.stdin.buffer.read(8)\n"
PROGRAMS = {
    "good": READ
    + "while head:\n"
    + " sys.stdin.buffer.read(int.from_bytes(head, 'little')); sys.stdout.write('.'); sys.stdout.flush()\n"
    + " head = sys.stdin.buffer.read(8)\n",
    "never ready": "import time; time.sleep(60)",
    "ends at once": "",
    "ends with a job": READ,
    "hangs with a job": READ + "import time; time.sleep(60)",
}


def segment(number: int) -> Any:
    return SimpleNamespace(name=f"s{number}", module=None, examples=())


def started(program: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", PROGRAMS[program]], stdin=pipe, stdout=pipe)


def compiled_here(num_segments: int, elapsed_s: float = 1.0, compiling_s: float = 0.1) -> tuple[list[str], list[str]]:
    """The names of segments that this process compiled by itself, and of those that helpers had taken."""
    waiting, own = deque(segment(i) for i in range(num_segments)), []
    with CompileHelpers[Any]() as helpers:
        while waiting:
            own.append(waiting.popleft().name)
            helpers.note(elapsed_s, waiting)
            outputs = [helper.process.stdout for helper in helpers.helpers if not helper.has_ended]
            if outputs:  # compiling takes as long as a helper needs to say something
                select.select(outputs, [], [], compiling_s)
        taken = [s.name for s in helpers.taken()]
    assert all(helper.process.returncode is not None for helper in helpers.helpers)
    return own, taken


@pytest.mark.long(but="ends at once")
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_segment_comes_back_once(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_helpers, "start_helper", lambda: started(program))
    monkeypatch.setattr(compile_helpers, "num_helpers", lambda: 2)
    monkeypatch.setattr(compile_helpers, "packed", lambda *_: b"a job")
    monkeypatch.setattr(compile_helpers, "PATIENCE", 0.2)
    own, taken = compiled_here(16, compiling_s=10.0 if program == "good" else 0.1)
    assert sorted(own + taken) == sorted(f"s{i}" for i in range(16))
    assert own[0] == "s0"
    if program == "good":
        assert len(taken) > 3 and "s15" in taken
    if program in ("never ready", "ends at once"):
        assert taken == []


def test_what_cannot_be_packed_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_helpers, "start_helper", lambda: started("good"))
    monkeypatch.setattr(compile_helpers, "num_helpers", lambda: 1)
    monkeypatch.setattr(compile_helpers, "packed", lambda *_: None)
    own, taken = compiled_here(10)
    assert sorted(own + taken) == sorted(f"s{i}" for i in range(10))


@pytest.mark.parametrize(("num_segments", "elapsed_s"), [(16, 0.01), (6, 1.0)])
def test_nobody_helps_where_it_does_not_pay(
    num_segments: int, elapsed_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where segments come from the cache, and where few are left."""
    monkeypatch.setattr(compile_helpers, "start_helper", lambda: pytest.fail("a helper was started"))
    monkeypatch.setattr(compile_helpers, "num_helpers", lambda: 2)
    assert compiled_here(num_segments, elapsed_s)[1] == []


def test_helpers_go_when_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_helpers, "start_helper", lambda: started("never ready"))
    monkeypatch.setattr(compile_helpers, "num_helpers", lambda: 2)
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError), CompileHelpers[Any]() as helpers:
        helpers.note(1.0, deque(segment(i) for i in range(16)))
        raise ZeroDivisionError
    assert [helper.process.returncode for helper in helpers.helpers] == [-9, -9]
    assert threading.active_count() == threads


def test_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compile_helpers.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with torch._inductor.config.patch(compile_threads=32):
        assert num_helpers() == 7
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert num_helpers() == 1
    with torch._inductor.config.patch(compile_threads=1):
        assert num_helpers() == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch._inductor.config.patch(compile_threads=32):
        assert num_helpers() == 0


ASKING = """
import sys
import sys
from collections import deque
from types import SimpleNamespace
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from chunkc._torch_compat.inductor import inductor_compile
from chunkc._torch_compat.inductor_jobs import packed
from chunkc._torch_compat.compile_helpers import Helper, start_helper

torch.use_deterministic_algorithms("deterministic" in sys.argv)
module = make_fx(lambda x: (x.sin() + 1,), tracing_mode="fake")(torch.ones(64))
for node in module.graph.nodes:
    node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
segment, helper = SimpleNamespace(), Helper(start_helper())
assert helper.done(100.0) == [] and helper.is_ready
helper.hand_out(segment, packed(module, examples))
assert helper.done(100.0) == [segment] and not helper.has_ended
helper.hand_out(segment, b"no graph")
assert helper.done(100.0) == [segment] and helper.has_ended
helper.process.communicate()
compiled = inductor_compile(module, examples)
assert torch.equal(compiled([torch.zeros(64)])[0], torch.ones(64))
assert counters["inductor"]["fxgraph_cache_hit"] == 1, counters
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithms", ["any", "deterministic"])
def test_what_a_helper_compiled_is_in_the_cache(algorithms: str, tmp_path: Path) -> None:
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-c", ASKING, algorithms]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_graph_that_calls_what_has_no_name_is_not_packed() -> None:
    from chunkc._torch_compat.inductor_jobs import packed

    fake = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(2))
    call = next(n for n in fake.graph.nodes if n.op == "call_function")
    call.target = lambda x, one: x + one
    assert packed(fake, [n.meta["val"] for n in fake.graph.find_nodes(op="placeholder")]) is None


def test_a_graph_of_another_device_is_not_packed() -> None:
    from chunkc._torch_compat.inductor_jobs import packed

    module = make_fx(lambda x: (x + 1,))(torch.ones(2))
    assert packed(module, [torch.empty(2, device="meta")]) is None
    fake = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(2))
    assert packed(fake, [n.meta["val"] for n in fake.graph.find_nodes(op="placeholder")]) is not None
