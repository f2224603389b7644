"""Training under context parallelism on the ranks of a job: each has a slice of every sequence."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from divided_models import DIVIDED_CASES, seeded
from models import Batch, Case, loss_of
from parallel_models import NUM_HEADS, PARALLEL_CASES, Attention, Gpt, batches
from rank_tensor import DoneParallel, mesh_of, received_nbytes, text_of, train_steps
from rank_training import GIB, QUICK, ROOMY, machine_of
from tiny_transformers import TINY_BERT, TINY_GEMMA3, TINY_LLAMA
from torch import nn
from training import Recipe

import chunkc
from chunkc.capture.attention import in_slices
from chunkc.ir.work import Kind

CP = (("cp", 2),)
SHARD_AND_CP = (("dp_shard", 2), ("cp", 2))


class PlacedGpt(Gpt):
    """A GPT whose caller hands in positions, as whoever slices sequences must."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1).float(), labels.flatten())


class FoldedAttention(Attention):
    """Attention whose heads are folded into the batch, for which no kernel without a mask serves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length = x.shape[:2]
        heads = (
            w(x).view(size, length, NUM_HEADS, -1).transpose(1, 2).flatten(0, 1) for w in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.unflatten(0, (size, -1)).transpose(1, 2).reshape(size, length, -1))


def folded() -> nn.Module:
    model = PlacedGpt()
    for block in model.h:
        block.attn.__class__ = FoldedAttention
    return model


def placed(batch: Batch) -> Batch:
    return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1]).expand(2, -1)}


def shifted(case: str) -> list[Batch]:
    """Batches whose labels are those of the next positions, also at the end of a slice; at the end of all the first."""
    found = [placed(batch) for batch in DIVIDED_CASES[case].batches()]
    return [{**batch, "shift_labels": batch["labels"].roll(-1, 1)} for batch in found]


def typed() -> list[Batch]:
    """Batches for BERT, which else would cut its types of tokens by itself."""
    found = [placed(batch) for batch in DIVIDED_CASES["qwen3"].batches()]
    return [{**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])} for batch in found]


def answered(length: int) -> list[Batch]:
    """Batches for T5: questions of twelve tokens, and answers of ``length``, shifted behind a first token."""
    found = list[Batch]()
    for batch in DIVIDED_CASES["t5"].batches():
        tokens = batch["input_ids"]
        answer = tokens.flip(1)[:, :length].contiguous()
        found.append({**placed(batch), "labels": answer, "decoder_input_ids": answer.roll(1, 1)})
        found[-1]["decoder_input_ids"][:, 0] = 0
    return found


class Wrapped(nn.Module):
    """A module of the user's around a model of transformers, with activation checkpointing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.model.activation_checkpointing_enable()

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return 2 * loss


class Encoded(nn.Module):
    """A T5 whose encoder is called with a mask of its own, as where several questions have one answer."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = DIVIDED_CASES["t5"].build()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **answers: torch.Tensor) -> torch.Tensor:
        encoded = self.model.encoder(input_ids=input_ids, attention_mask=input_ids % 2)
        loss: torch.Tensor = self.model(encoder_outputs=encoded, position_ids=position_ids, **answers).loss
        return loss


def masked_bert() -> nn.Module:
    return seeded(replace(TINY_BERT, head="AutoModelForMaskedLM"))


CONTEXT_CASES: dict[str, Case] = {
    "llama": PARALLEL_CASES["llama"],
    "gpt": Case("gpt", PlacedGpt, lambda: list(map(placed, batches()))),
    "gpt_folded": Case("gpt_folded", folded, lambda: list(map(placed, batches()))),
    "gpt_wrapped": Case("gpt_wrapped", lambda: Wrapped(DIVIDED_CASES["gpt2"].build()), lambda: shifted("gpt2")),
    "hf_llama": Case("hf_llama", DIVIDED_CASES["llama_tied"].build, lambda: shifted("llama_tied")),
    "hf_gpt2": Case("hf_gpt2", DIVIDED_CASES["gpt2"].build, lambda: shifted("gpt2")),
    "hf_qwen3": Case("hf_qwen3", DIVIDED_CASES["qwen3"].build, lambda: shifted("qwen3")),
    "hf_bert": Case("hf_bert", masked_bert, typed),
    "hf_t5": Case("hf_t5", DIVIDED_CASES["t5"].build, lambda: answered(6)),
    "hf_t5_even": Case("hf_t5_even", DIVIDED_CASES["t5_gated"].build, lambda: answered(12)),
}


@dataclass(frozen=True, slots=True)
class Sliced:
    """What ranks of a mesh train; without ``hw``, on the smallest machine that `chunkc.BudgetError` names."""

    name: str
    mesh: tuple[tuple[str, int], ...] = CP
    recipe: Recipe = QUICK
    hw: Any = ROOMY
    dtype: torch.dtype = torch.float32
    backend: str = "eager"
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return CONTEXT_CASES[self.name]

    @property
    def num_slices(self) -> int:
        return dict(self.mesh)["cp"]

    def parts(self) -> list[list[Batch]]:
        """This rank's micro-batches of each step: slices of those of its line."""
        (line, place), num = divmod(torch.distributed.get_rank(), self.num_slices), self.accumulate
        num_lines = torch.distributed.get_world_size() // self.num_slices
        steps = [
            [self.case.batches()[(step * num_lines + line) * num % 4 + part] for part in range(num)]
            for step in range(self.recipe.num_steps)
        ]
        return [[sliced(batch, self.num_slices, place) for batch in batches] for batches in steps]


def sliced(batch: Batch, num_slices: int, place: int) -> Batch:
    return {name: value.chunk(num_slices, dim=1)[place].contiguous() for name, value in batch.items()}


def compiled(work: Sliced, hw: Any) -> nn.Module:
    options: dict[str, Any] = {"dtype": work.dtype, "backend": work.backend, "accumulate": work.accumulate}
    return chunkc.compile(work.case.build(), hw, mesh=mesh_of(work), **options)


def planned_text(work: Sliced) -> tuple[str, str]:
    """The plan of this rank as text, without the times that planning took, and its digest."""
    model = compiled(work, work.hw)
    loss_of(model(**work.parts()[0][0])).backward()
    return text_of(model)


def train(work: Sliced, max_norm: float | None = None) -> DoneParallel:
    """The user's loop."""
    steps = work.parts()
    model = compiled(work, work.hw or _smallest(work, steps[0][0]))
    optimizer = work.recipe.ours(model.parameters(), **work.options)
    return train_steps(model, optimizer, steps, max_norm)


def train_in_pieces(work: Sliced, mask_nbytes: int) -> DoneParallel:
    """`train` where masks of attention may take ``mask_nbytes``."""
    before = in_slices.MASK_NBYTES
    in_slices.MASK_NBYTES = mask_nbytes  # type: ignore[misc]
    try:
        return train(work)
    finally:
        in_slices.MASK_NBYTES = before  # type: ignore[misc]


def _smallest(work: Sliced, batch: Batch) -> Any:
    model = compiled(work, machine_of(1, GIB))
    _optimizer = work.recipe.ours(model.parameters(), **work.options)
    try:
        model(**batch)
    except chunkc.BudgetError as error:
        return machine_of(error.min_device_nbytes, error.min_host_nbytes)
    raise AssertionError("one byte of device memory was found to suffice")


def exchanged(work: Sliced) -> tuple[int, int]:
    """Bytes that this rank receives by the collectives of attention in one iteration: by the plan, and as counted."""
    model, (batch,) = compiled(work, ROOMY), work.parts()[0]
    optimizer = work.recipe.ours(model.parameters())
    for _ in range(2):
        with torch.profiler.profile(record_shapes=True) as profile:
            loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = received_nbytes(profile, work.num_slices)
    segments = chunkc.plan_of(model).segments
    return sum(w.nbytes for s in segments for w in s.work if w.kind is Kind.LINK), counted


class Scores(nn.Module):
    """Attention operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        scores = torch.softmax(hidden @ hidden.transpose(1, 2), dim=-1)
        return (nn.functional.scaled_dot_product_attention(hidden, hidden, scores @ hidden)).mean()


class Masked(nn.Module):
    """Attention with a mask that is handed in, if any; without one, no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.linear(x)
        if mask is None:
            return hidden.mean()
        return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask).mean()


def refusals() -> dict[str, str]:
    """The errors of what context parallelism does not serve, by what was tried."""
    x, found = torch.ones(2, 6, 8), dict[str, str]()
    tokens = placed_part("hf_llama")
    packed = {**tokens, "position_ids": tokens["position_ids"] % 3}
    unshifted = {name: value for name, value in tokens.items() if name != "shift_labels"}
    unplaced = {name: value for name, value in tokens.items() if name != "position_ids"}
    answers = placed_part("hf_t5")
    questions, keys = answers["input_ids"], transformers.EncoderDecoderCache(*(transformers.DynamicCache(),) * 2)
    unanswered = {name: value for name, value in answers.items() if name != "decoder_input_ids"}
    windowed = seeded(replace(TINY_LLAMA, config={**TINY_LLAMA.config, "model_type": "mistral"}), sliding_window=4)
    calls: dict[str, Callable[[], object]] = {
        "scores": lambda: chunkc.compile(Scores(), ROOMY, mesh="cp=2")(x),
        "mask": lambda: chunkc.compile(Masked(), ROOMY, mesh="cp=2")(x, torch.ones(6, 6)),
        "no attention": lambda: chunkc.compile(Masked(), ROOMY, mesh="cp=2")(x),
        "counted": lambda: chunkc.compile(Gpt(), ROOMY, mesh="cp=2")(**batches()[0]),
        "positions": lambda: chunkc.compile(DIVIDED_CASES["llama_tied"].build(), ROOMY, mesh="cp=2")(**unplaced),
        "last logits": lambda: compiled(Sliced("hf_llama"), ROOMY)(**tokens, logits_to_keep=1),
        "packed": lambda: compiled(Sliced("hf_llama"), ROOMY)(**packed),
        "labels": lambda: compiled(Sliced("hf_llama"), ROOMY)(**unshifted),
        "wrapped": lambda: chunkc.compile(Wrapped(DIVIDED_CASES["gpt2"].build()), ROOMY, mesh="cp=2")(
            input_ids=tokens["input_ids"]
        ),
        "head": lambda: chunkc.compile(DIVIDED_CASES["bert"].build(), ROOMY, mesh="cp=2"),
        "layers": lambda: chunkc.compile(nn.TransformerEncoderLayer(8, 2), ROOMY, mesh="cp=2")(x),
        "evaluated": evaluate_encoder_layer,
        "full_params": call_within_full_params,
        "padding": lambda: chunkc.compile(DIVIDED_CASES["llama_tied"].build(), ROOMY, mesh="cp=2")(
            **tokens, attention_mask=torch.ones_like(tokens["input_ids"])
        ),
        "window": lambda: chunkc.compile(windowed, ROOMY, mesh="cp=2")(**tokens),
        "answers": lambda: compiled(Sliced("hf_t5"), ROOMY)(**unanswered),
        "answers by number": lambda: compiled(Sliced("hf_t5"), ROOMY)(**answers, num_items_in_batch=3),
        "padded answers": lambda: compiled(Sliced("hf_t5"), ROOMY)(**answers, decoder_attention_mask=questions),
        "kept keys": lambda: compiled(Sliced("hf_t5"), ROOMY)(**answers, past_key_values=keys),
        "encoder alone": lambda: chunkc.compile(Encoded(), ROOMY, mesh="cp=2")(**answers),
        "architecture": lambda: chunkc.compile(seeded(TINY_GEMMA3), ROOMY, mesh="cp=2"),
    }
    for name, call in calls.items():
        try:
            call()
        except chunkc.ChunkcError as error:
            found[name] = str(error)
    return found


def evaluate_encoder_layer() -> None:
    """Before anything was trained, and so checked."""
    with torch.no_grad():
        chunkc.compile(nn.TransformerEncoderLayer(8, 2).train(), ROOMY, mesh="cp=2")(torch.ones(2, 6, 8))


def call_within_full_params() -> None:
    model = compiled(Sliced("llama"), ROOMY)
    with chunkc.full_params(model):
        model(**placed_part("llama"))


def placed_part(name: str) -> Batch:
    return sliced(CONTEXT_CASES[name].batches()[0], 2, torch.distributed.get_rank())


def wrong_slices(kind: str) -> str:
    """The error of a forward of a T5 whose slices have other numbers of labels, or were shifted by each rank."""
    model, batch = compiled(Sliced("hf_t5"), ROOMY), placed_part("hf_t5")
    if kind == "labels":
        batch["labels"][0, : torch.distributed.get_rank()] = -100
    else:
        batch["decoder_input_ids"] = batch["labels"].roll(1, 1)
        batch["decoder_input_ids"][:, 0] = 0
    try:
        model(**batch)
    except chunkc.ChunkcError as error:
        return str(error)
    return ""


def count_from_zero() -> str:
    """The error of a forward whose positions are those of the first slice on all ranks."""
    model, tokens = compiled(Sliced("hf_llama"), ROOMY), placed_part("hf_llama")
    positions = torch.arange(tokens["input_ids"].shape[1]).expand(2, -1)
    try:
        model(**{**tokens, "position_ids": positions})
    except chunkc.ChunkcError as error:
        return str(error)
    return ""


def compute_size_of_rank(sizes: tuple[int, int]) -> str:
    """The error of a forward for which each rank has slices of its own length, with as many tokens if that is longer.

    Both sizes were trained on before.
    """
    model, tokens = compiled(Sliced("llama"), ROOMY), torch.arange(16)
    optimizer = chunkc.AdamW(model.parameters())
    for length in sizes:
        batch = tokens[: max(16, length)].view(-1, length)[: 16 // length]
        model(input_ids=batch, labels=batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    length = sizes[torch.distributed.get_rank()]
    batch = tokens.view(-1, length)[:2]
    try:
        model(input_ids=batch, labels=batch)
    except chunkc.ChunkcError as error:
        return str(error)
    return ""


def evaluate(work: Sliced) -> list[float]:
    """Losses of whole sequences without gradients, behind one step and two."""
    model, (batch,) = compiled(work, ROOMY), work.parts()[0]
    optimizer, losses = work.recipe.ours(model.parameters()), list[float]()
    for _ in range(2):
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss = model(**batch)
        losses.append(loss_of(loss).item())
    return losses


def run_program(source: str) -> float:
    """The loss of a program of a page, for a model of transformers and its tokens."""
    case = DIVIDED_CASES["llama_tied"]
    names = {"torch": torch, "chunkc": chunkc, "model": case.build(), "tokens": case.batches()[0]["input_ids"]}
    exec(source, names)
    return loss_of(names["loss"]).item()


def train_for_ever(report: Callable[[str], None]) -> None:
    """Train, and report ``warm`` once."""
    work = Sliced("llama")
    model, (batch,) = compiled(work, ROOMY), work.parts()[0]
    optimizer = chunkc.AdamW(model.parameters())
    for step in range(1_000_000):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            report("warm")
