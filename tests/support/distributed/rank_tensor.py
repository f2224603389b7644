"""Training under tensor parallelism on the ranks of a job, and whole values of what they then have."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint
from accumulating import micro_batches
from divided_models import DIVIDED_CASES
from models import Batch, Case, loss_of
from parallel_models import PARALLEL_CASES, parallelise
from rank_training import GIB, QUICK, ROOMY, machine_of
from torch import nn
from training import Recipe, Trained

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.work import Kind

TP = (("tp", 2),)
TP_AND_SHARD = (("dp_shard", 2), ("tp", 2))


@dataclass(frozen=True, slots=True)
class Parallel:
    """What ranks of a mesh train; without ``hw``, on the smallest machine that `chunkc.BudgetError` names.

    ``is_text``: chunkc.compile is handed the mesh as a text. Models of `DIVIDED_CASES` are divided by chunkc.compile.
    """

    name: str
    mesh: tuple[tuple[str, int], ...] = TP
    recipe: Recipe = QUICK
    hw: Any = ROOMY
    dtype: torch.dtype = torch.float32
    backend: str = "eager"
    accumulate: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    is_text: bool = False

    @property
    def case(self) -> Case:
        return (PARALLEL_CASES | DIVIDED_CASES)[self.name]

    @property
    def num_data(self) -> int:
        """Ranks that take batches of their own."""
        return torch.distributed.get_world_size() // dict(self.mesh)["tp"]

    @property
    def data_rank(self) -> int:
        return torch.distributed.get_rank() // dict(self.mesh)["tp"]


@dataclass(slots=True)
class DoneParallel:
    """Whole values, of all ranks together; ``norms`` are of the gradients before each step's clip."""

    trained: Trained
    norms: list[float]
    stats: dict[str, int]


def mesh_of(work: Parallel) -> Any:
    names, sizes = zip(*work.mesh, strict=True)
    return torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def compiled(work: Parallel, hw: Any) -> nn.Module:
    model, mesh = work.case.build(), mesh_of(work)
    if work.name in PARALLEL_CASES:
        parallelise(work.name, model, mesh["tp"])
    mesh = ",".join(f"{name}={size}" for name, size in work.mesh) if work.is_text else mesh
    options: dict[str, Any] = {"dtype": work.dtype, "backend": work.backend, "accumulate": work.accumulate}
    return chunkc.compile(model, hw, mesh=mesh, **options)


def smallest_machine(work: Parallel, batch: Batch) -> Any:
    model = compiled(work, machine_of(1, GIB))
    _optimizer = work.recipe.ours(model.parameters(), **work.options)
    try:
        model(**batch)
    except chunkc.BudgetError as error:
        return machine_of(error.min_device_nbytes, error.min_host_nbytes)
    raise AssertionError("one byte of device memory was found to suffice")


def own_batches(work: Parallel) -> list[list[Batch]]:
    """The micro-batches of each step."""
    batches, num = work.case.batches(), work.accumulate
    first, end = work.data_rank * num, (work.data_rank + 1) * num
    steps = range(work.recipe.num_steps)
    return [micro_batches(batches, step, num * work.num_data)[first:end] for step in steps]


def whole(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor behind a DTensor; collective."""
    full: Any = value
    found: torch.Tensor = full.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().to("cpu", copy=True)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    memory = compiled_of(model).runtime.parameters
    graded = {n: (i, p.grad) for i, (n, p) in enumerate(model.named_parameters()) if p.grad is not None}
    return {name: whole(memory.whole(index, grad.detach().clone())) for name, (index, grad) in graded.items()}


def train(work: Parallel, max_norm: float | None = None) -> DoneParallel:
    """The user's loop; ``max_norm``: clip every step by ``chunkc.clip_grad_norm_``."""
    steps = own_batches(work)
    model = compiled(work, work.hw or smallest_machine(work, steps[0][0]))
    optimizer = work.recipe.ours(model.parameters(), **work.options)
    torch.manual_seed(work.recipe.seed + work.data_rank)
    return train_steps(model, optimizer, steps, max_norm)


def train_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[Sequence[Batch]], max_norm: float | None
) -> DoneParallel:
    """The loop over the micro-batches of each step; ``max_norm`` as of `train`."""
    done = DoneParallel(Trained(), [], {})
    for number, parts in enumerate(steps):
        losses = []
        for part in parts:
            loss = loss_of(model(**part)) / len(parts)
            loss.backward()
            losses.append(loss.item())
        if number == 0:
            done.trained.gradients = gradients(model)
        if max_norm is not None:
            done.norms.append(chunkc.clip_grad_norm_(model, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        done.trained.losses.append(sum(losses))
    read_whole(done.trained, model, optimizer)
    return replace(done, stats=chunkc.stats(model))


def read_whole(found: Trained, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state, names = model.state_dict(), [n for n, _ in model.named_parameters()]
    found.params = {n: whole(state[n]) for n in names}
    for index, moments in optimizer.state_dict()["state"].items():
        found.exp_avg[names[index]] = whole(moments["exp_avg"])
        found.exp_avg_sq[names[index]] = whole(moments["exp_avg_sq"])


def train_with_torch(work: Parallel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of the first batch in ``work.dtype``: of chunkc, and of the same DTensors without it."""
    plain = PARALLEL_CASES[work.name].build().to(work.dtype)
    parallelise(work.name, plain, mesh_of(work)["tp"])
    torch.manual_seed(work.recipe.seed + work.data_rank)
    loss_of(plain(**own_batches(work)[0][0])).backward()
    wanted = {name: whole(param.grad) for name, param in plain.named_parameters() if param.grad is not None}
    return train(work).trained.gradients, wanted


RECEIVED = {
    "_c10d_functional::all_reduce": lambda nbytes, size: 2 * (size - 1) * nbytes // size,
    "_c10d_functional::all_gather_into_tensor": lambda nbytes, size: (size - 1) * nbytes,
    "_c10d_functional::reduce_scatter_tensor": lambda nbytes, size: (size - 1) * nbytes // size,
}
"""By collective: bytes that a rank receives by one of a tensor of so many, by the ring algorithms."""


def received_nbytes(profile: torch.profiler.profile, size: int) -> int:
    """Bytes of float32 that a rank of ``size`` received by functional collectives, from what each was handed."""
    events = [event for event in profile.events() or () if event.name in RECEIVED]
    return sum(RECEIVED[event.name](4 * prod(event.input_shapes[0]), size) for event in events)


def exchanged_by_model(work: Parallel) -> tuple[int, int]:
    """Bytes that this rank receives by the model's collectives in one iteration: by the plan, and as counted."""
    model, batch = compiled(work, ROOMY), PARALLEL_CASES[work.name].batches()[0]
    optimizer = work.recipe.ours(model.parameters())
    for _ in range(2):
        with torch.profiler.profile(record_shapes=True) as profile:
            model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = received_nbytes(profile, dict(work.mesh)["tp"])
    segments = chunkc.plan_of(model).segments
    return sum(w.nbytes for s in segments for w in s.work if w.kind is Kind.LINK), counted


def planned_text(work: Parallel) -> tuple[str, str]:
    """The plan of this rank as text, without the times that planning took, and its digest."""
    model = compiled(work, work.hw)
    model(**own_batches(work)[0][0]).backward()
    return text_of(model)


def text_of(model: nn.Module) -> tuple[str, str]:
    plan = chunkc.plan_of(model)
    return replace(plan, stages=()).text(), plan.digest()


def refusals() -> dict[str, str]:
    """The errors of what tensor parallelism does not serve, by what was called."""
    model, found = compiled(Parallel("llama"), ROOMY), {}
    _optimizer = chunkc.AdamW(model.parameters())
    loss = model(**PARALLEL_CASES["llama"].batches()[0])
    loss.backward()
    calls = {
        "full_params": lambda: chunkc.full_params(model).__enter__(),
        "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "plan": lambda: chunkc.plan(other(), ROOMY, example_inputs=PARALLEL_CASES["llama"].batches()[0]),
        "plan of compiled": lambda: chunkc.plan(model, f"2x{ROOMY}", mesh="tp=2", example_inputs=()),
        "no mesh": lambda: chunkc.compile(other(), ROOMY),
        "not parallel": lambda: chunkc.compile(PARALLEL_CASES["llama"].build(), ROOMY, mesh="tp=2"),
        "pipeline": lambda: chunkc.compile(other(), ROOMY, mesh="pp=2"),
        "nodes": lambda: chunkc.compile(other(), ROOMY, mesh="tp=2", shard="node"),
    }
    for name, call in calls.items():
        try:
            call()
        except chunkc.ChunkcError as error:
            found[name] = str(error)
    return found


def start_with_other_values(work: Parallel) -> list[str]:
    """Compile a model whose values are the rank's own; names of parameters that are not those of the first rank."""
    model = work.case.build()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.distributed.get_rank())
    chunkc.compile(model, ROOMY, mesh=",".join(f"{name}={size}" for name, size in work.mesh), dtype=work.dtype)
    state = model.state_dict()
    wanted = dict(work.case.build().named_parameters())
    return [name for name, value in wanted.items() if not torch.equal(whole(state[name]), value)]


def other() -> nn.Module:
    model = PARALLEL_CASES["llama"].build()
    parallelise("llama", model, mesh_of(Parallel("llama"))["tp"])
    return model


def drop_out_where_one_draws(number: int, backend: str, name: str = "gpt_dropout") -> tuple[str, bool, list[float]]:
    """Train; before forward ``number`` rank 1 draws alone.

    Returns the error of that forward, whether parameters are as before it, and the losses of the others.
    """
    model, found = compiled(Parallel(name, backend=backend), ROOMY), ("", False)
    optimizer, losses = chunkc.AdamW(model.parameters(), lr=1e-2), list[float]()
    torch.manual_seed(0)
    for step in range(5):
        before = {n: whole(value) for n, value in model.state_dict().items()}
        if step == number and torch.distributed.get_rank() == 1:
            torch.rand(1)
        try:
            loss = model(**PARALLEL_CASES[name].batches()[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            torch.rand(3)
        except chunkc.RankError as error:
            found = str(error), all(torch.equal(whole(v), before[n]) for n, v in model.state_dict().items())
            torch.manual_seed(1)
    return *found, losses


def evaluate_where_one_draws() -> list[str]:
    """Errors of forwards without gradients that drop out; before the last, rank 1 draws alone."""
    model, batch = compiled(Parallel("gpt_dropout"), ROOMY), PARALLEL_CASES["gpt_dropout"].batches()[0]
    optimizer, texts = chunkc.AdamW(model.parameters(), lr=1e-2), list[str]()
    torch.manual_seed(0)
    model(**batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    for number in range(4):
        if number == 3 and torch.distributed.get_rank() == 1:
            torch.rand(1)
        try:
            with torch.no_grad():
                model(**batch)
            texts.append("")
        except chunkc.RankError as error:
            texts.append(str(error))
    return texts


def compute_length_of_rank() -> str:
    """The error of a first forward for which the second rank has half as many tokens."""
    model, batch = compiled(Parallel("llama"), ROOMY), PARALLEL_CASES["llama"].batches()[0]
    length = min(value.shape[1] for value in batch.values()) // (1 + torch.distributed.get_rank())
    try:
        model(**{name: value[:, :length] for name, value in batch.items()})
    except chunkc.ChunkcError as error:
        return str(error)
    return ""


def reload(name: str) -> dict[str, bool]:
    """Load what a run saved: its own state dict, and a plain one of whole tensors; then the values are those.

    They also evaluate as the plain model does.
    """
    case = Parallel(name).case
    batches = case.batches()
    first, second = compiled(Parallel(name), ROOMY), compiled(Parallel(name), ROOMY)
    optimizer, other_optimizer = (chunkc.AdamW(m.parameters(), lr=1e-2) for m in (first, second))
    for batch in batches[:2]:
        loss_of(first(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(second(**batches[0])).backward()
    other_optimizer.step()
    other_optimizer.zero_grad()
    second.load_state_dict({name: whole(value) for name, value in first.state_dict().items()})
    other_optimizer.load_state_dict(optimizer.state_dict())
    losses = []
    for model, stepped in ((first, optimizer), (second, other_optimizer)):
        loss = loss_of(model(**batches[2]))
        loss.backward()
        stepped.step()
        stepped.zero_grad()
        losses.append(loss.item())
    state, other_state = first.state_dict(), second.state_dict()
    plain = case.build()
    plain.load_state_dict({name: whole(value) for name, value in state.items()})
    with torch.no_grad():  # the first call gathers parameters, later ones run a program
        evaluated = [loss_of(first(**batches[3])).item() for _ in range(3)]
        wanted = loss_of(plain(**batches[3])).item()
    with torch.no_grad():
        for param in second.parameters():
            param.zero_()
    second.load_state_dict(dict(plain.named_parameters(remove_duplicate=False)), strict=False)
    loaded = second.state_dict()
    return {
        "evaluated": all(abs(loss - wanted) < 1e-5 * wanted for loss in evaluated),
        "losses": losses[0] == losses[1],
        "values": all(torch.equal(whole(state[name]), whole(other_state[name])) for name in state),
        "parameters": all(torch.equal(whole(state[name]), whole(loaded[name])) for name in state),
        "dtensors": sum(hasattr(value, "full_tensor") for value in state.values()) > len(batches),
        "keys": list(state) == list(case.build().state_dict()),
    }


def load_names_of_rank() -> str:
    """The error of loading DTensors, of which the second rank leaves one out that is divided block by block."""
    model = compiled(Parallel("gpt2"), ROOMY)
    state = model.state_dict()
    if torch.distributed.get_rank() == 1:
        del state["transformer.h.0.attn.c_attn.weight"]
    try:
        model.load_state_dict(state)
    except chunkc.RankError as error:
        return str(error)
    return ""


def train_for_ever(report: Callable[[str], None], ends: int = -1) -> None:
    """Train, and report ``warm`` once; then rank ``ends`` ends in the middle of a step."""
    model = compiled(Parallel("llama_sequence"), ROOMY)
    optimizer = chunkc.AdamW(model.parameters())
    for step in range(1_000_000):
        loss = model(**PARALLEL_CASES["llama_sequence"].batches()[0])
        if step == 2:
            report("warm")
            if torch.distributed.get_rank() == ends:
                os._exit(3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save_weights(work: Parallel, folder: str) -> dict[str, torch.Tensor]:
    """Train a step, save weights of whole tensors, and return whole values of the state dict."""
    model = compiled(work, work.hw)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    loss_of(model(**own_batches(work)[0][0])).backward()
    optimizer.step()
    chunkc.save_safetensors(model, folder, max_shard_size="50KB")
    return {name: whole(value) for name, value in model.state_dict().items()}


def save_by_torch(name: str, path: str) -> dict[str, torch.Tensor]:
    """Train a step, save the state dict by torch.distributed.checkpoint, and return whole values of it."""
    model = compiled(Parallel(name), ROOMY)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    loss_of(model(**Parallel(name).case.batches()[0])).backward()
    optimizer.step()
    state = model.state_dict()
    torch.distributed.checkpoint.save(state, checkpoint_id=path)
    return {name: whole(value) for name, value in state.items()}
