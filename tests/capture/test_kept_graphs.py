"""Graphs kept between runs: a later capture is the first one, to the byte; whatever differs is captured anew."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from child_environment import environment
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from chunkc._torch_compat.capture_cache import keeps_captures
from chunkc.capture.backend import ModelTensors, capture_graph
from chunkc.capture.graphs import Captured
from chunkc.capture.tracing import TracingOptions
from chunkc.compiler.segment_compiler import SegmentCompiler
from chunkc.compiler.validation import param_infos

pytestmark = pytest.mark.skipif(not keeps_captures(), reason="torch before 2.13 keeps no capture of tensor subclasses")

KEPT = "both graphs as an earlier run kept them"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where documents are kept, in a cache of Inductor's that is empty."""
    monkeypatch.delenv("CHUNKC_CACHE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "aotautograd"


class Capturing:
    """A backend that captures one graph, and interprets it."""

    def __init__(self, model: nn.Module, kept: str | None, tracing: TracingOptions) -> None:
        self.tensors = ModelTensors(model, model.parameters(), param_infos(model, None))
        self.kept, self.tracing = kept, tracing
        self.captured: list[Captured] = []

    def __call__(self, module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        functions = [lambda args, kind=kind: self.run(kind, args) for kind in ("forward", "backward")]
        captured, code = capture_graph(module, examples, self.tensors, self.tracing, *functions, kept_by=self.kept)
        self.captured.append(captured)
        return code

    def run(self, kind: str, args: list[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = Interpreter(self.captured[-1].graphs[kind].module).boxed_run(args)
        return outputs


class Run:
    """One forward and backward of a model, captured: its loss, its gradients and buffers, and what was captured."""

    def __init__(self, model: nn.Module, kept: str | None, *inputs: torch.Tensor, **options: Any) -> None:
        backend = Capturing(model, kept, options.pop("tracing", TracingOptions()))
        torch.compiler.reset()  # of one function Dynamo captures a few models only
        torch.manual_seed(3)
        loss = torch.compile(model, backend=backend, **options)(*inputs)
        loss.backward()
        [self.captured] = backend.captured
        self.values = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
        self.is_kept = KEPT in [stage.note for stage in self.captured.stages]


class Layers(nn.Module):
    """Two layers; ``second`` stands under another name where asked for."""

    scale: torch.Tensor

    def __init__(self, name: str = "second") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.name = nn.Linear(4, 6), name
        self.add_module(name, nn.Linear(6, 3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.get_submodule(self.name)(torch.tanh(self.first(x))) * self.scale
        return y.square().mean()


class Varied(nn.Module):
    """Dropout, a statistic that forward changes, a weight used twice, a constant, and a layer that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self._block, self.norm(self.first(x)), use_reentrant=False)
        return (nn.functional.dropout(y, 0.3) * torch.tensor([1.0, 2.0, 3.0, 4.0])).square().mean()

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first.weight)


class Views(nn.Module):
    """Values for backward that are views of one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.both = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.both(x).chunk(2, -1)
        return (left * right.transpose(0, 1)[:4].t().sigmoid()).sum()


def batch(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))


def nodes(module: GraphModule) -> list[tuple[Any, ...]]:
    """All that planning and Inductor read of a graph; memory is told by the first node that has it."""
    memory: dict[int, str] = {}
    found = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        facts: tuple[Any, ...] = (type(value),)
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            layout = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
            facts = (*layout, storage.nbytes(), memory.setdefault(storage._cdata, node.name))
        names = [n.name for n in node.all_input_nodes]
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.name)
        found.append((node.op, str(node.target), node.name, str(args), names, facts, node.meta.get("stack_trace")))
    return found


INDUCTOR = SegmentCompiler.of("inductor").tracing
CASES = {"layers": (Layers, TracingOptions()), "varied": (Varied, INDUCTOR), "views": (Views, TracingOptions())}


@pytest.mark.parametrize("case", CASES)
def test_a_later_capture_is_the_first(case: str, folder: Path) -> None:
    make, tracing = CASES[case]
    without = Run(make(), None, batch(), tracing=tracing)
    first, second = (Run(make(), "", batch(), tracing=tracing) for _ in range(2))
    assert (without.is_kept, first.is_kept, second.is_kept) == (False, False, True)
    assert second.captured.schedule == first.captured.schedule == without.captured.schedule
    assert second.captured.held_at_start_nbytes == without.captured.held_at_start_nbytes
    assert second.captured.tangents == without.captured.tangents
    for kind in ("forward", "backward"):
        assert nodes(second.captured.graphs[kind].module) == nodes(without.captured.graphs[kind].module)
        assert second.captured.graphs[kind].params == without.captured.graphs[kind].params
    for run in (first, second):
        assert all(map(torch.equal, run.values, without.values))
        assert len(run.values) == len(without.values)


def frozen(model: Layers) -> Layers:
    model.first.bias.requires_grad_(False)
    return model


class Moved(Layers):
    """The same layers from another line of the source."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.get_submodule(self.name)(torch.tanh(self.first(x))) * self.scale
        return y.square().mean()


OTHERS: dict[str, Callable[[Path], Run]] = {
    "facts": lambda folder: Run(Layers(), "other", batch()),
    "name of a module": lambda folder: Run(Layers("last"), "", batch()),
    "frozen parameter": lambda folder: Run(frozen(Layers()), "", batch()),
    "dtype": lambda folder: Run(Layers().bfloat16(), "", batch().bfloat16()),
    "shape": lambda folder: Run(Layers(), "", batch(6)),
    "fused": lambda folder: Run(Layers(), "", batch(), tracing=TracingOptions(fuses=True)),
    "gradient of the input": lambda folder: Run(Layers(), "", batch().requires_grad_()),
    "line": lambda folder: Run(Moved(), "", batch()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_is_captured_anew(other: str, folder: Path) -> None:
    Run(Layers(), "", batch())
    assert Run(Layers(), "", batch()).is_kept
    assert not OTHERS[other](folder).is_kept
    assert OTHERS[other](folder).is_kept
    assert Run(Layers(), "", batch()).is_kept


class Attention(nn.Module):
    """Self-attention, a product of three, and a layer in a checkpoint, whose name may differ."""

    def __init__(self, name: str = "inner") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.name = name
        self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.get_submodule(self.name), x, use_reentrant=False)
        heads = y[None, None]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]
        return torch.einsum("ij,jk,kl->", mixed, y, x)


def settings(name: str) -> AbstractContextManager[Any]:
    """A setting of the process that decides what is traced, other than it is."""
    if name == "attention kernels":
        return sdpa_kernel([SDPBackend.MATH])
    if name == "order of attention kernels":
        return sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True)
    return torch.backends.opt_einsum.flags(enabled=False) if name == "einsum" else without_mkldnn()


@contextmanager
def without_mkldnn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TF32, which is set along
        with torch.backends.mkldnn.flags(enabled=False):
            yield


HAS_EINSUM = torch.backends.opt_einsum.is_available()
EINSUM = pytest.param("einsum", marks=pytest.mark.skipif(not HAS_EINSUM, reason="opt_einsum is not installed"))


@pytest.mark.parametrize("name", ["attention kernels", "order of attention kernels", "mkldnn", EINSUM])
def test_settings_that_decide_what_is_traced_are_known(name: str, folder: Path) -> None:
    Run(Attention(), "", batch())
    with settings(name):
        changed, again, without = (Run(Attention(), kept, batch()) for kept in ("", "", None))
    assert [run.is_kept for run in (changed, again)] == [False, True]
    assert nodes(again.captured.backward.module) == nodes(without.captured.backward.module)
    assert Run(Attention(), "", batch()).is_kept


def test_names_inside_of_a_checkpoint_are_known(folder: Path) -> None:
    assert not any(Run(Attention(name), "", batch()).is_kept for name in ("inner", "other"))
    assert Run(Attention("other"), "", batch()).is_kept


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("kept_graphs", "FRAGMENT") as library:
        yield library


def test_operators_of_a_library_are_captured_in_every_run(library: torch.library.Library, folder: Path) -> None:
    """Their rules are code that no key has: here a body of simpler operators, which changes."""
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: x * 2, "CompositeImplicitAutograd")

    class Scaled(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.ops.kept_graphs.scaled(super().forward(x))
            return found

    assert not any(Run(Scaled(), "", batch()).is_kept for _ in range(2))
    assert not folder.exists()


def test_an_operator_of_torch_that_is_overridden_is_captured_anew(folder: Path) -> None:
    Run(Layers(), "", batch())
    with torch.library._scoped_library("aten", "IMPL") as override, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is overridden
        override.impl("tanh", torch.sin, "AutogradCPU")
        changed, without = Run(Layers(), "", batch()), Run(Layers(), None, batch())
    assert not changed.is_kept
    assert all(map(torch.equal, changed.values, without.values))


def test_decompositions_of_a_user_are_captured_in_every_run(folder: Path) -> None:
    def sine(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.sin.default(x)

    tracing = replace(INDUCTOR, decompositions={**(INDUCTOR.decompositions or {}), torch.ops.aten.tanh.default: sine})
    assert not any(Run(Layers(), "", batch(), tracing=tracing).is_kept for _ in range(2))
    assert not folder.exists()


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x + y) * self.weight).sum()


def test_memory_of_inputs_is_known(folder: Path) -> None:
    """Inputs apart, over one memory side by side, over the same rows, and part of more memory."""
    rows = torch.randn(8, 4)
    pairs = {
        "apart": (rows[:4].clone(), rows[4:].clone()),
        "beside": (rows[:4], rows[4:]),
        "over": (rows[:4], rows[2:6]),
        "part": (rows[:4].clone(), torch.randn(64, 4)[4:8]),
    }
    for inputs in pairs.values():
        first, again, without = (Run(Sum(), kept, *inputs) for kept in ("", "", None))
        assert [run.is_kept for run in (first, again)] == [False, True]
        assert again.captured.held_at_start_nbytes == without.captured.held_at_start_nbytes
        assert again.captured.schedule == without.captured.schedule


@pytest.mark.parametrize("breaks", ["removed", "cut", "changed", "empty"])
def test_graphs_of_a_broken_entry_are_captured_anew(breaks: str, folder: Path) -> None:
    first = Run(Layers(), "", batch())
    [path] = [path for path in folder.rglob("*") if path.is_file()]
    whole = path.read_bytes()
    middle = whole.index(b"x\x01") + 64  # in the document, which zlib begins so
    if breaks == "removed":
        path.unlink()
    else:
        changed = whole[:middle] + bytes(byte ^ 1 for byte in whole[middle : middle + 8]) + whole[middle + 8 :]
        path.write_bytes({"cut": whole[:middle], "changed": changed, "empty": b""}[breaks])
    again = Run(Layers(), "", batch())
    assert not again.is_kept
    assert all(map(torch.equal, again.values, first.values))
    assert nodes(again.captured.forward.module) == nodes(first.captured.forward.module)
    if breaks == "removed":
        assert Run(Layers(), "", batch()).is_kept


def test_nothing_is_kept_where_caches_are_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert not any(Run(Layers(), "", batch()).is_kept for _ in range(2))
    monkeypatch.setenv("CHUNKC_CACHE", "0")
    assert not any(Run(Layers(), "", batch()).is_kept for _ in range(2))
    assert not folder.exists()


def test_graphs_for_any_size_are_not_kept(folder: Path) -> None:
    runs = [Run(Layers(), "", batch(5), dynamic=True) for _ in range(2)]
    assert not any(run.is_kept for run in runs)
    assert runs[0].captured.symbolic is not None
    assert not folder.exists()


class LargeConstant(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tensor([[1.0] * 100] * 100).sum() * self.scale


def test_graphs_that_fit_into_no_document_are_captured_every_time(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "chunkc"):
        runs = [Run(LargeConstant(), "", batch()) for _ in range(2)]
    assert not any(run.is_kept for run in runs)
    assert not folder.exists()
    assert "are not kept for later runs" in caplog.text


def test_a_kept_capture_holds_no_node_of_another_graph(folder: Path) -> None:
    """Both graphs are whole: what their nodes refer to is in the same graph."""
    _, run = [Run(Varied(), "", batch(), tracing=INDUCTOR) for _ in range(2)]
    assert run.is_kept
    for graph in run.captured.graphs.values():
        own = set[Node](graph.module.graph.nodes)
        assert all(set(node.all_input_nodes) <= own for node in own)
        graph.module.graph.lint()


@pytest.mark.long
def test_another_process_finds_the_capture(folder: Path) -> None:
    """With another seed of hashes: no order of a set is in a key."""
    program = "import test_kept_graphs as tests; print(tests.Run(tests.Attention(), '', tests.batch()).is_kept)"
    for seed, is_kept in (("1", "False"), ("2", "True"), ("3", "True")):
        environ = environment(PYTHONHASHSEED=seed, TORCHINDUCTOR_CACHE_DIR=str(folder.parent))
        environ.pop("CHUNKC_CACHE", None)
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environ, cwd=Path(__file__).parent, capture_output=True, text=True)
        assert done.stdout.strip() == is_kept, done.stderr
