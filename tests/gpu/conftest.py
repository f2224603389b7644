"""Machines of the GPU tests (this GPU, or a stand-in by ``--stand-in``), and the arithmetic of comparisons."""

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from machines import EMULATED, Machine
from placements import Identities
from plan_runner import GetRunner
from shared_runs import Runs, SharedRunners
from training import GetPlain, train_plain, train_plain_16

Note = Callable[[str, object], None]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; torch asks for it


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    kind = request.config.getoption("--stand-in")
    if kind == "emulated":
        yield EMULATED
        return
    from cuda_machine import Cuda, Double

    found = Double() if kind == "double" else Cuda()
    with pytest.MonkeyPatch.context() as patch:
        if kind == "double":
            patch.setattr("chunkc.api.device_for", found.device_for)
        yield found


@pytest.fixture
def cuda(machine: Machine) -> Machine:
    if machine.kind != "cuda":
        pytest.skip(f"needs a GPU, which the stand-in {machine.kind!r} is not")
    return machine


@pytest.fixture(scope="session", autouse=True)
def exact_arithmetic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.allow_tf32 = False
    assert torch.get_float32_matmul_precision() == "highest"
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.fixture(scope="module", autouse=True)
def released() -> Iterator[None]:
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def note(record_property: Note, request: pytest.FixtureRequest) -> Note:
    """``note(name, value)``: say a reading in the report of the tests, and in their XML."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")

    def say(name: str, value: object) -> None:
        record_property(name, value)
        if reporter is not None:
            reporter.write_line(f"reading: {name} = {value}")

    return say


@pytest.fixture(scope="session")
def runner_of(machine: Machine) -> Iterator[GetRunner]:
    """``runner_of(name, dtype, backend)``: the runner of a model, captured at its first use."""
    runners = SharedRunners(machine)
    yield runners
    runners.clear()
    gc.collect()


@pytest.fixture(scope="session")
def plain_of(machine: Machine) -> GetPlain:
    return Runs(train_plain, machine)


@pytest.fixture(scope="session")
def plain_64_of(machine: Machine) -> GetPlain:
    """``plain_64_of(name, recipe)``: the same in float64."""
    return Runs(partial(train_plain, dtype=torch.float64), machine)


@pytest.fixture(scope="session")
def plain_16_of(machine: Machine) -> GetPlain:
    """``plain_16_of(name, recipe)``: the same in bfloat16 with an fp32 master."""
    return Runs(train_plain_16, machine)


@pytest.fixture(scope="session")
def identities() -> Identities:
    """Identity runs, each made once."""
    return Identities()
