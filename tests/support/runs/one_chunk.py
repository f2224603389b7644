"""A model's runtime for tests of the optimizers: everything in one chunk of host memory, gradients from ``p.grad``."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chunkc.distributed.process_group import Ranks
from chunkc.ir.state_spec import ADAM_STATES, StateSpec
from chunkc.runtime.optim.optimizers import Adam, AdamW
from chunkc.runtime.optim.state_dict import find_runtime
from chunkc.runtime.storage.transaction import Transactions
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import AdamHyper, rule_of
from chunkc.runtime.update.update_inputs import StepInputs

Adjust = Callable[[AdamHyper, int], tuple[AdamHyper, int]]
Optimizer = AdamW | Adam | torch.optim.Optimizer
GAP = 5
PAIRS = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)]


class OneChunk:
    """The steps of a model whose updates wait until something looks, as those of a worker may."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32, adjust: Adjust | None = None) -> None:
        named = dict(model.named_parameters())
        self.names, self.params = list(named), list(named.values())
        self.ranks, self.has_optimizer = Ranks(), False
        self.runtime = self.steps = self.parameters = self.clipping = self
        self.owners: dict[int, object] = {}
        self.transactions = Transactions(lambda: None, lambda work: work)
        self.adjust = adjust
        self.is_sixteen_bit = dtype is not torch.float32
        self.pieces: list[Piece] = []
        at = 0
        for index, p in enumerate(self.params):
            self.pieces.append(Piece(index, at, at + p.numel()))
            at += p.numel() + GAP
            p.chunkc_store, p.chunkc_index = self, index  # type: ignore[attr-defined]
        self.payload = torch.zeros(at, dtype=dtype)
        self.lists = {"param32": torch.zeros(at)}
        for piece, p in zip(self.pieces, self.params, strict=True):
            self.lists["param32"][piece.start : piece.end] = p.detach().float().flatten()
        self.layout: Any = None
        self.state_spec = ADAM_STATES
        self.pending: list[tuple[Mapping[int, AdamHyper], Mapping[int, int]]] = []

    def whole(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """As of a parameter that is no part of another."""
        return value

    part = whole

    @property
    def state_spec(self) -> StateSpec:
        return self._state_spec

    @state_spec.setter
    def state_spec(self, spec: StateSpec) -> None:
        """States of NaN where there were none of their name."""
        if getattr(self, "_state_spec", None) == spec:
            return
        self._state_spec, old = spec, self.lists
        master = old["param32"]
        self.lists = {
            name: old.get(name, torch.full_like(master, torch.nan)) for name in (entry.name for entry in spec.lists())
        }
        self.chunk = ChunkUpdate(rule_of(spec), self.payload, tuple(self.lists.values()), self.pieces)

    def name_of(self, index: int) -> str:
        return self.names[index]

    def is_trained(self, index: int) -> bool:
        return True

    def settle(self) -> None:
        self.transactions.finish()

    def prepare_step(self, stepped: Collection[int]) -> None:
        pass

    def check_step(self) -> frozenset[int]:
        return frozenset(i for i, p in enumerate(self.params) if p.grad is not None)

    def step(self, hypers: Mapping[int, AdamHyper], steps: Mapping[int, int]) -> None:
        self.drain()
        for piece, p in zip(self.pieces, self.params, strict=True):
            if p.grad is not None:
                self.payload[piece.start : piece.end] = p.grad.flatten()
        hypers, steps = dict(hypers), dict(steps)
        for i in hypers if self.adjust else ():
            hypers[i], steps[i] = self.adjust(hypers[i], steps[i])
        self.pending.append((hypers, steps))

    def drain(self) -> None:
        for hypers, steps in self.pending:
            self.chunk.update(StepInputs(hypers, steps, len(self.params)))
            self.write_back()
        self.pending.clear()

    @torch.no_grad()
    def write_back(self) -> None:
        for piece, p in zip(self.pieces, self.params, strict=True):
            p.copy_(self.payload[piece.start : piece.end].view(p.shape))

    def view(self, param: int, name: str) -> Tensor:
        piece = self.pieces[param]
        return self.lists[name][piece.start : piece.end].view(self.params[param].shape)

    def read_state(self, param: int, names: Sequence[str] = ("exp_avg", "exp_avg_sq", "param32")) -> tuple[Tensor, ...]:
        self.drain()
        return tuple(self.view(param, name).clone() for name in names)

    def write_state(self, param: int, states: Mapping[str, Tensor], param32: Tensor | None) -> None:
        self.drain()
        for name, value in {**states, **({} if param32 is None else {"param32": param32})}.items():
            self.view(param, name).copy_(value)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 53), nn.LayerNorm(53), nn.Tanh(), nn.Linear(53, 3)).to(dtype)


def make_pair(
    dtype: torch.dtype = torch.float32, adjust: Adjust | None = None
) -> tuple[nn.Sequential, OneChunk, nn.Sequential]:
    model = make_model(dtype)
    return model, OneChunk(model, dtype, adjust), make_model(dtype)


def set_gradients(models: list[nn.Sequential], seed: int, skip: tuple[str, ...] = ()) -> None:
    """The same random gradients for all models; drains first, as a forward would."""
    for model in models:
        found = find_runtime(next(model.parameters()))
        if found is not None and isinstance(found[0], OneChunk):
            found[0].drain()
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype) * 0.1
            p.grad = None if name in skip or not p.requires_grad else gradient


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    first, rest = list(model[0].parameters()), [p for part in model[1:] for p in part.parameters()]
    return [{"params": first, "lr": 3e-3, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]


def assert_same_params(model: nn.Sequential, plain: nn.Sequential, tolerance: float = 1e-6) -> None:
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=tolerance, atol=tolerance)


def assert_same_states(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert found["state"].keys() == wanted["state"].keys()
    for key, state in wanted["state"].items():
        assert found["state"][key]["step"] == state["step"]
        assert found["state"][key]["step"].dtype == state["step"].dtype
        for name, atol in (("exp_avg", 2e-8), ("exp_avg_sq", 1e-9)):
            torch.testing.assert_close(found["state"][key][name], state[name], rtol=2e-6, atol=atol)
