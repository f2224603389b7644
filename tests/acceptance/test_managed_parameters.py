"""ACCEPTANCE 19: managed parameters met by anything else are right, or refused by name; never a crash, never silence.

Everything is done to a compiled model and to its plain twin, in every phase that a user can meet (``small.PHASES``),
and compared element by element; where something is refused, training goes on as the twin's afterwards.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import CASES
from safetensors.torch import load_file, save_file
from small import PHASES, TOLERANCE, Small, Twins, twins_at
from torch import nn
from torch.nn.utils import get_total_norm, parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode

import chunkc
from chunkc import ChunkcError
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.actions import Stream


@pytest.fixture(scope="module", params=PHASES)
def met(request: pytest.FixtureRequest) -> Iterator[Twins]:
    """Twins for tests that only look; one pair for each phase."""
    yield twins_at(request.param)


def weights(twins: Twins) -> tuple[nn.Parameter, nn.Parameter]:
    """One trained weight on both sides."""
    return twins.model.get_parameter("second.weight"), twins.plain.get_parameter("second.weight")


def close(found: Any, expected: Any) -> None:
    """Equal within what two correct updates differ by."""
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": lambda p: p.detach().clone(),
    "arithmetic": lambda p: (p * 2 + 1).mean(0).detach(),
    "data": lambda p: p.data + 0,
    "index": lambda p: p[3].detach() + 0,
    "transpose": lambda p: p.t().reshape(-1)[5:40].detach() + 0,
    "view": lambda p: p.view(4, -1).detach() + 0,
    "unbind": lambda p: torch.stack(p.detach().unbind()[::2]),
    "chunk": lambda p: p.detach().chunk(3)[1] + 0,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "asarray": lambda p: torch.from_numpy(np.asarray(p.detach(), dtype=np.float32).copy()),
    "view as numpy": lambda p: torch.from_numpy(p.detach().t().numpy().copy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "half": lambda p: p.half().detach().float(),
    "isclose": lambda p: torch.isclose(p, p + 0).all(),
    "iterate": lambda p: torch.stack([row.sum() for row in p]).detach(),
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p.detach()),
    "save": lambda p: saved(p).detach(),
    "save data": lambda p: saved(p.data),
    "save view": lambda p: saved(p.detach()[2:5]),
    "deepcopy": lambda p: copy.deepcopy(p).detach(),
    "copy": lambda p: copy.copy(p).detach() + 0,
}


def saved(value: Any) -> Any:
    """``value`` through ``torch.save`` and a load that trusts nothing."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert not any(
        "chunkc" in type(t).__module__ for t in (found, *(found.values() if isinstance(found, dict) else ()))
    )
    return found


@pytest.mark.parametrize("read", READS)
def test_reading_gives_the_true_value(met: Twins, read: str) -> None:
    """Every way to look at a parameter, frozen and unused ones included."""
    found, expected = (READS[read](p) for p in weights(met))
    close(found, expected)
    if read in ("clone", "numpy", "save", "deepcopy", "tolist"):
        for name in ("scale", "unused", "last.bias"):
            close(READS[read](met.model.get_parameter(name)), READS[read](met.plain.get_parameter(name)))


def test_facts_of_a_parameter_are_its_own(met: Twins) -> None:
    """Metadata, identity and text, without reading."""
    p, q = weights(met)
    facts = (
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "ndim",
    )
    for fact in (*facts, "nbytes", "itemsize"):
        assert getattr(p, fact) == getattr(q, fact), fact
    for fact in ("numel", "size", "stride", "dim", "is_contiguous", "element_size", "is_floating_point", "__len__"):
        assert getattr(p, fact)() == getattr(q, fact)(), fact
    assert isinstance(p, nn.Parameter)
    assert repr(p) == "chunkc.Parameter('second.weight')(shape=(16, 16), dtype=torch.float32, requires_grad=True)"
    assert str(met.model) == str(met.plain)
    assert {p: 1}[p] == 1 and any(p is other for other in met.model.parameters())
    assert f"{p.sum():.3f}" == f"{q.sum():.3f}"


MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda p: p.data_ptr(),
    "view data_ptr": lambda p: p.view(-1).data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "storage": lambda p: p.storage(),
    "share_memory_": lambda p: p.share_memory_(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
}


@pytest.mark.parametrize("ask", MEMORY)
def test_what_needs_an_address_is_refused_by_name(met: Twins, ask: str) -> None:
    """Storage-less memory never shows."""
    for p in (weights(met)[0], weights(met)[0].data):
        with pytest.raises(ChunkcError, match=r"second\.weight.*no memory of its own"):
            MEMORY[ask](p)


def test_numpy_cannot_lose_a_write(met: Twins) -> None:
    """An array over a copy is read-only; torch's own rule about gradients holds."""
    with pytest.raises(ValueError, match="read-only"):
        weights(met)[0].detach().numpy()[0] = 1
    with pytest.raises(RuntimeError, match="requires grad"):
        weights(met)[0].numpy()


def test_gradients_are_true_or_gone(met: Twins, request: pytest.FixtureRequest) -> None:
    """Between backward and step ``.grad`` is the gradient, read in any way; otherwise there is none."""
    met.check_gradients()
    if request.node.callspec.params["met"] != "graded":
        return
    p, q = weights(met)
    assert p.grad is not None and q.grad is not None
    for read in ("clone", "index", "view", "numpy", "tolist", "save", "deepcopy"):
        close(READS[read](p.grad), READS[read](q.grad))
    assert "second.weight" in repr(p.grad)
    both = [[r.grad for r in side.parameters() if r.grad is not None] for side in (met.model, met.plain)]
    close(get_total_norm(both[0]), get_total_norm(both[1]))
    with pytest.raises(ChunkcError, match=r"second\.weight"):
        p.grad.data_ptr()


def test_copies_are_plain_models_with_true_values(met: Twins) -> None:
    """``deepcopy``, pickle and ``torch.save`` of the whole model: real parameters, no chunkc behind them."""
    file = io.BytesIO()
    torch.save(met.model, file)
    file.seek(0)
    copies = [copy.deepcopy(met.model), pickle.loads(pickle.dumps(met.model)), torch.load(file, weights_only=False)]
    for other in copies:
        assert {type(p) for p in other.parameters()} == {nn.Parameter}
        assert other._compiled_call_impl is None
        for p, q in zip(other.parameters(), met.plain.parameters(), strict=True):
            close(p.detach(), q.detach())
            assert p.requires_grad == q.requires_grad and p.data_ptr()
        close(other(met.x).detach(), met.plain(met.x).detach())
        other(met.x).backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert other.half() is other and other.second.weight.dtype is torch.half, "conversions work on a copy"
        assert other.state_dict()["second.weight"].dtype is torch.half
    met.check_params()


def test_state_dicts_are_real(met: Twins) -> None:
    """Whole, part, with variables, flattened; both ways with plain PyTorch."""
    state = met.model.state_dict()
    assert list(state) == list(met.plain.state_dict()) and {type(v) for v in state.values()} == {torch.Tensor}
    for key, value in met.plain.state_dict().items():
        close(saved(state)[key], value)
    part = met.model.second.state_dict(prefix="p.")
    assert {type(v) for v in part.values()} == {torch.Tensor}
    close(part["p.weight"], weights(met)[1].detach())
    assert met.model.state_dict(keep_vars=True)["second.weight"] is weights(met)[0]
    other = Small()
    assert other.load_state_dict(state).missing_keys == []
    close(parameters_to_vector(met.model.parameters()).detach(), parameters_to_vector(other.parameters()).detach())
    close(parameters_to_vector(met.model.parameters()).detach(), parameters_to_vector(met.plain.parameters()).detach())


def test_averages_follow_the_true_values(met: Twins) -> None:
    """An EMA copy updated from managed parameters, by hand and by torch's own class."""
    averages = []
    for side in (met.model, met.plain):
        ema, swa = copy.deepcopy(side), torch.optim.swa_utils.AveragedModel(side)
        with torch.no_grad():
            for a, p in zip(ema.parameters(), side.parameters(), strict=True):
                a.mul_(0.5).add_(p * 3, alpha=0.5)
        swa.update_parameters(side)
        averages.append((*ema.parameters(), *swa.module.parameters()))
    for a, b in zip(*averages, strict=True):
        close(a.detach(), b.detach())


def test_forwards_without_gradients_and_of_parts_are_true(met: Twins) -> None:
    """The gathered path, a submodule called by itself, and differentiating through a parameter eagerly."""
    with torch.no_grad():
        close(met.model(met.x), met.plain(met.x))
    with torch.inference_mode():
        close(met.model(met.x), met.plain(met.x))
    close(met.model.first(met.x).detach(), met.plain.first(met.x).detach())
    p, q = weights(met)
    close(torch.autograd.grad(p.pow(2).sum(), p)[0], torch.autograd.grad(q.pow(2).sum(), q)[0])


def test_parameters_outlive_their_model_without_a_crash() -> None:
    """Reads and writes of what is left raise by name; nothing touches memory that was given back."""
    twins = twins_at("graded")
    p = weights(twins)[0]
    grad, view, whole = p.grad, p.t(), copy.deepcopy(p)
    expected = weights(twins)[1].detach()
    twins.model = twins.optimizer = None  # type: ignore[assignment]
    gc.collect()
    for use in (lambda: p.sum(), lambda: grad.sum(), lambda: p.data.zero_(), lambda: p.tolist(), lambda: p.numpy()):
        with pytest.raises(ChunkcError, match="deleted"):
            use()
    assert "second.weight" in repr(p)
    close(view.t().detach() + 0, expected)
    close(whole.detach(), expected)


def test_collecting_a_model_while_torch_traces_runs_no_operator() -> None:
    """The garbage collector runs at any time, so also in the middle of a capture, under its modes."""
    twins = twins_at("pending")
    p = weights(twins)[0]

    class NoOperators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} ran")

    with NoOperators():
        twins.model = twins.optimizer = None  # type: ignore[assignment]
        gc.collect()
    with pytest.raises(ChunkcError, match="deleted"):
        p.sum()


@pytest.mark.filterwarnings("ignore:Exception in thread chunkc-host:pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", (False, True))
def test_a_model_collected_on_a_worker_of_its_device_gives_its_memory_back(fails: bool) -> None:
    """The garbage collector runs on any thread; nobody waits for itself, and a failure nobody saw keeps no memory."""
    twins = twins_at("graded")
    device, held, collected = compiled_of(twins.model).runtime.device, [twins.model], threading.Event()
    total_nbytes, host_nbytes = device.device_budget_nbytes, device.host_budget_nbytes
    assert device.free_device_nbytes() < total_nbytes
    twins.model = twins.optimizer = None  # type: ignore[assignment]

    def collect() -> None:
        held.clear()
        gc.collect()
        collected.set()
        if fails:
            raise ValueError("an update failed")  # which the thread that closes the model is told

    done = device.launch(Stream.CPU, "collect", (), collect)
    assert collected.wait(60), "the worker waits for itself"
    for thread in threading.enumerate():
        if thread.name == "chunkc-host":
            thread.join()
    assert done.done()
    assert (device.free_device_nbytes(), device.free_host_nbytes()) == (total_nbytes, host_nbytes)


def test_sixteen_bit_models_show_parameters_in_their_dtype_and_keep_them_in_fp32() -> None:
    """In mixed precision reads are in compute dtype; state dicts and copies have the dtype that was handed over."""
    twins = twins_at("settled", dtype=torch.bfloat16)
    assert weights(twins)[0].dtype is torch.bfloat16
    state = twins.model.state_dict()
    master = twins.model.second.state_dict()["weight"]
    assert master.dtype is torch.float32 and not torch.equal(master, master.bfloat16().float()), "from the fp32 master"
    for p, value in ((weights(twins)[0], state["second.weight"]), (twins.model.scale, state["scale"])):
        assert value.dtype is torch.float32
        assert torch.equal(p.detach().clone(), value.bfloat16())
    for other in (copy.deepcopy(twins.model), pickle.loads(pickle.dumps(twins.model))):
        assert torch.equal(other.second.weight, master)
    assert saved(weights(twins)[0]).dtype is torch.float32


@pytest.mark.long
def test_hugging_face_saves_and_loads_a_compiled_model(tmp_path: Path) -> None:
    """``save_pretrained`` and safetensors of a model with tied embeddings, after a step: true values, tied once."""
    case = CASES["gpt2"]
    model, batch = (
        chunkc.compile(case.build(), "emulated-64m-64m", dtype=torch.float32, backend="eager"),
        case.batches()[0],
    )
    model(**batch).loss.backward()
    chunkc.AdamW(model.parameters(), lr=1e-2).step()
    state = model.state_dict()
    assert not torch.equal(state["lm_head.weight"], case.build().lm_head.weight), "the step was made"
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr(), "tied in the state dict"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, state[key]), key
    save_file(model.transformer.h.state_dict(), tmp_path / "part.safetensors")
    for key, value in load_file(tmp_path / "part.safetensors").items():
        assert torch.equal(value, state[f"transformer.h.{key}"]), key


CRASHES = """
import torch, sys, chunkc
sys.path[:0] = {paths!r}
from small import twins_at
p = twins_at("graded").model.second.weight
for tensor in (p, p.data, p.grad, p.t()):
    tries = [
        lambda: torch.Tensor.data_ptr(tensor), lambda: torch.Tensor.untyped_storage(tensor).nbytes(),
        lambda: bytes(torch.Tensor.untyped_storage(tensor)), lambda: torch.utils.dlpack.to_dlpack(tensor),
        lambda: torch.Tensor.numpy(tensor.detach()), lambda: torch.as_tensor(tensor.detach()) + 0,
        lambda: torch.Tensor.share_memory_(tensor), lambda: tensor.pin_memory(), lambda: tensor.to("meta"),
        lambda: torch.tensor(tensor.tolist()), lambda: memoryview(tensor.detach().numpy()).nbytes,
        lambda: torch.multiprocessing.reductions.reduce_tensor(tensor), lambda: torch._C._to_dlpack(tensor),
        lambda: torch.frombuffer(tensor.detach().numpy(), dtype=torch.float32), lambda: torch.save(tensor, "/dev/null"),
    ]
    for number, attempt in enumerate(tries):
        print(number, flush=True)
        try:
            attempt()
        except Exception as error:  # whatever refuses it, and however: only a crash is wrong
            print(type(error).__name__, flush=True)
print("alive")
"""


@pytest.mark.long
def test_nothing_crashes_the_process() -> None:
    """Ways around the operators, by the base class and by C functions, in a process of their own."""
    paths = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-c", CRASHES.format(paths=paths)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"died after try {done.stdout.split()[-1:]}: {done.stderr[-600:]}"
    assert done.stdout.endswith("alive\n")
