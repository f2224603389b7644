"""Kept loops: found again without Inductor, never in place of another library, and checked before they are used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import clear_caches

from chunkc._torch_compat.inductor import loop_facts
from chunkc.runtime.update.cpu_update_kernel import host_kernel
from chunkc.runtime.update.kept_loops import CompiledLoop, kept_or_compiled
from chunkc.runtime.update.rules import ADAM, LION, SGD_MOMENTUM, UpdateRule

Loops = Callable[[str], list[CompiledLoop]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Inductor's that is empty, with documents."""
    monkeypatch.delenv("CHUNKC_CACHE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    clear_caches()  # of libraries that this process has loaded from another one
    return tmp_path


@pytest.fixture
def compiled(cache: Path) -> CompiledLoop:
    library = cache / "ab" / "loop.so"
    library.parent.mkdir()
    library.write_bytes(b"machine code")
    return CompiledLoop(str(library), "kernel", (("input", 0), ("numel", 0)))


def first(facts: str, compile_loop: Callable[[], CompiledLoop]) -> CompiledLoop:
    return next(kept_or_compiled(facts, compile_loop))


def never() -> CompiledLoop:
    raise AssertionError("the loop is kept, and was compiled again")


def test_a_loop_is_found_again_without_being_compiled(compiled: CompiledLoop) -> None:
    assert first("adam", lambda: compiled) == compiled
    assert first("adam", never) == compiled


@pytest.mark.parametrize("differs", ["facts", "library", "no library", "document", "off"])
def test_another_loop_is_compiled(
    differs: str, compiled: CompiledLoop, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first("adam", lambda: compiled)
    if differs == "library":
        Path(compiled.library).write_bytes(b"other code")
    elif differs == "no library":
        Path(compiled.library).unlink()
    elif differs == "document":
        [path] = (cache / "chunkc").iterdir()
        path.write_text(json.dumps({"library": 3}))
    elif differs == "off":
        monkeypatch.setenv("CHUNKC_CACHE", "0")
    with pytest.raises(AssertionError, match="compiled again"):
        first("lion" if differs == "facts" else "adam", never)


def test_whoever_refuses_a_kept_loop_gets_one_compiled_anew(compiled: CompiledLoop) -> None:
    first("adam", lambda: compiled)
    anew = CompiledLoop(compiled.library, "other", compiled.order)
    assert [loop.symbol for loop in kept_or_compiled("adam", lambda: anew)] == ["kernel", "other"]
    assert first("adam", never).symbol == "other"


def test_a_library_outside_of_the_cache_is_not_kept(compiled: CompiledLoop, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("outside") / "loop.so"
    shutil.copy(compiled.library, outside)
    elsewhere = CompiledLoop(str(outside), "kernel", ())
    assert first("adam", lambda: elsewhere) == elsewhere
    with pytest.raises(AssertionError, match="compiled again"):
        first("adam", never)


def num_compilations(rule: UpdateRule) -> int:
    """How many graphs Inductor sees when the kernel of a rule is made as in a new process."""
    before = sum(counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "hit", "bypass"))
    host_kernel.__wrapped__(rule, torch.float16, torch.float32, is_parallel=False)  # dtypes that no other test takes
    return sum(counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "hit", "bypass")) - before


@pytest.mark.usefixtures("cache")
def test_a_kept_kernel_takes_no_inductor(caplog: pytest.LogCaptureFixture) -> None:
    assert [num_compilations(ADAM) for _ in range(3)] == [1, 0, 0]
    assert "runs eagerly" not in caplog.text


def test_a_kept_loop_of_another_rule_is_refused(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lion's document under the key of SGD with momentum, whose loop takes as many lists: that is compiled anew."""
    num_compilations(SGD_MOMENTUM)
    [of_sgd] = (cache / "chunkc").iterdir()
    right = of_sgd.read_text()
    num_compilations(LION)
    [of_lion] = set((cache / "chunkc").iterdir()) - {of_sgd}
    of_sgd.write_text(of_lion.read_text())
    assert num_compilations(SGD_MOMENTUM) == 1
    assert of_sgd.read_text() == right
    assert "runs eagerly" not in caplog.text


def test_facts_tell_settings_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [loop_facts(is_parallel=parallel) for parallel in (False, True, False)]
    assert facts[0] == facts[2] != facts[1]
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert loop_facts(is_parallel=False) != facts[0]
    monkeypatch.setenv("CXXFLAGS", "-O0")
    assert loop_facts(is_parallel=False) != facts[0]
