"""Managed tensors over a store that keeps plain tensors: what an operator reads, writes and returns, role by role."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from chunkc._torch_compat.core import swap_tensors
from chunkc.errors import ChunkcError
from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.params.manage import manage
from chunkc.runtime.params.managed_tensor import ManagedTensor, inner_of
from chunkc.runtime.storage.staging import StagingStore


class DictStore:
    holds = "params"

    def __init__(self) -> None:
        self.values = [torch.arange(6.0).view(2, 3), torch.ones(4)]
        self.gradients = [torch.full((2, 3), 0.5), torch.full((4,), 0.25)]
        self.versions = [0, 0]
        self.stamp = 1
        self.num_reads = 0
        self.staging = StagingStore(self.values)
        self.differentiable_reads = list[int]()

    def note_differentiable_read(self, index: int) -> None:
        self.differentiable_reads.append(index)

    def name_of(self, index: int) -> str:
        return "ab"[index]

    def version_of(self, index: int) -> int:
        return self.versions[index]

    def read_param(self, index: int) -> torch.Tensor:
        self.num_reads += 1
        return self.values[index].clone()

    def read_exact(self, index: int) -> torch.Tensor:
        return self.values[index].double()

    def write_param(self, index: int, value: torch.Tensor) -> None:
        self.values[index] = value.clone()
        self.versions[index] += 1

    def read_grad(self, index: int, stamp: int) -> torch.Tensor:
        if stamp != self.stamp:
            raise ChunkcError(f"the gradient of {self.name_of(index)} is gone")
        return self.gradients[index].clone()

    def write_grad(self, index: int, stamp: int, value: torch.Tensor) -> None:
        self.gradients[index] = value.clone()


@pytest.fixture
def store() -> DictStore:
    return DictStore()


def managed(store: DictStore, index: int = 0) -> nn.Parameter:
    value = store.values[index]
    info = ParamInfo(store.name_of(index), (), tuple(value.shape), tuple(value.stride()), "float32", True)
    param = nn.Parameter(torch.zeros_like(value))
    manage(param, info, index, store, torch.device("cpu"))
    return param


def gradient(store: DictStore, index: int = 0) -> ManagedTensor:
    shell = inner_of(managed(store, index)).detach()
    return ManagedTensor(shell, "grad", index, store, store.stamp)


def test_managing_keeps_the_object_and_gives_the_payload_back(store: DictStore) -> None:
    value = torch.randn(2, 3)
    param = nn.Parameter(value)
    param.label = "kept"
    before, info = id(param), ParamInfo("a", (), (2, 3), (3, 1), "float32", True)
    original = manage(param, info, 0, store, torch.device("cpu"))
    assert id(param) == before and isinstance(param, ManagedTensor) and isinstance(param, nn.Parameter)
    assert param.label == "kept" and original.data_ptr() == value.data_ptr()
    assert inner_of(param).untyped_storage().nbytes() == 0, "nothing stands behind it"
    swap_tensors(param, original)
    assert type(param) is nn.Parameter and torch.equal(param, value)


def test_a_storage_less_tensor_has_the_layout_and_no_bytes(store: DictStore) -> None:
    param, info = nn.Parameter(torch.zeros(3, 5)), ParamInfo("t", (), (3, 5), (1, 3), "bfloat16", True)
    manage(param, info, 0, store, torch.device("cpu"))
    shell = inner_of(param)
    assert (shell.shape, shell.stride(), shell.dtype) == ((3, 5), (1, 3), torch.bfloat16)
    assert shell.untyped_storage().nbytes() == 0


def test_an_operator_reads_each_place_once(store: DictStore) -> None:
    a = managed(store)
    assert torch.equal(
        torch.stack([a.detach(), a.data, a.detach().detach()]), torch.arange(6.0).view(2, 3).expand(3, 2, 3)
    )
    assert store.num_reads == 1


def test_writes_reach_the_store_and_return_the_same_object(store: DictStore) -> None:
    a, b = managed(store, 0), managed(store, 1)
    with torch.no_grad():
        assert a.mul_(2) is a
        torch._foreach_add_([a, b], [torch.ones(2, 3), torch.ones(4)])
        torch.sub(b, 1, out=b.data)
    assert torch.equal(store.values[0], torch.arange(6.0).view(2, 3) * 2 + 1)
    assert torch.equal(store.values[1], torch.ones(4))


def test_two_names_of_one_place_share_a_write(store: DictStore) -> None:
    a = managed(store)
    with torch.no_grad():
        torch._foreach_mul_([a, a.data], 3)
    assert torch.equal(store.values[0], torch.arange(6.0).view(2, 3) * 9)


def test_gradients_are_read_and_written_where_they_are(store: DictStore) -> None:
    g = gradient(store)
    assert torch.equal(g * 2, torch.ones(2, 3))
    g.clamp_(max=0.1)
    assert torch.equal(store.gradients[0], torch.full((2, 3), 0.1)) and torch.equal(
        store.values[0].sum(), torch.tensor(15.0)
    )
    alias = g.detach()
    store.stamp += 1
    for kept in (g, alias):
        with pytest.raises(ChunkcError, match="gradient of a is gone"):
            kept.sum()


@pytest.mark.parametrize("take", [lambda a: a[0], lambda a: a.t(), lambda a: a.view(-1), lambda a: a.unbind()[1]])
def test_views_read_until_the_parameter_changes_and_refuse_writes(store: DictStore, take: object) -> None:
    a = managed(store)
    view = take(a.data)  # type: ignore[operator]
    assert torch.equal(view + 0, take(store.values[0]))  # type: ignore[operator]
    with pytest.raises(ChunkcError, match=r"View\('a'\)"):
        view.zero_()
    assert torch.equal(store.values[0], torch.arange(6.0).view(2, 3))
    deeper = view.view(-1) if view.is_contiguous() else view.t()
    a.data.add_(1)
    for stale in (view, deeper):
        with pytest.raises(ChunkcError, match="taken before the parameter changed"):
            stale.sum()


def test_shape_and_dtype_cannot_be_changed_in_place(store: DictStore) -> None:
    a = managed(store)
    for change in (
        lambda: a.data.resize_(7),
        lambda: a.data.set_(torch.zeros(3)),
        lambda: setattr(a, "data", torch.ones(2)),
    ):
        with pytest.raises(ChunkcError, match=r"Parameter\('a'\)"):
            change()
    assert torch.equal(store.values[0], torch.arange(6.0).view(2, 3))


def test_copies_and_files_hold_the_exact_value(store: DictStore) -> None:
    a, file = managed(store), io.BytesIO()
    torch.save([a, a.data, gradient(store)], file)
    file.seek(0)
    param, data, grad = torch.load(file)
    assert type(param) is nn.Parameter and param.dtype is torch.float64 and torch.equal(param, store.values[0].double())
    assert type(data) is torch.Tensor and torch.equal(data, store.values[0]) and torch.equal(grad, store.gradients[0])
    assert type(copy.deepcopy(a)) is nn.Parameter
    both = copy.deepcopy([a, a])
    assert both[0] is both[1], "ties are kept"


def test_numpy_reads_a_copy_that_cannot_be_written(store: DictStore) -> None:
    array = managed(store).detach().numpy()
    assert np.array_equal(array, store.values[0].numpy()) and not array.flags.writeable


def test_what_has_no_store_says_so() -> None:
    orphan = ManagedTensor(torch.zeros(2), "param", 3, None)
    with pytest.raises(ChunkcError, match=r"#3.*no compiled model"):
        orphan.sum()
    with pytest.raises(TypeError, match="not a managed tensor"):
        inner_of(torch.zeros(2))


def test_eager_gradients_flow_through_reads_and_views(store: DictStore) -> None:
    a = managed(store)
    (a[0] * 3 + a.t()[:, 1]).sum().backward()
    assert torch.equal(a.grad, torch.tensor([[3.0, 3.0, 3.0], [1.0, 1.0, 1.0]]))
