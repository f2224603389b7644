"""Stages of a pipeline: runs of layers of a transformers model, each of which is planned as a model.

    stage 1          tokens ─ embedding ─ layers ─ hidden states
    stages between   hidden states ─ layers ─ hidden states
    the last         hidden states ─ layers ─ norm ─ head ─ loss

Layers are divided evenly; of a number that does not divide, later stages have one more. A head whose weight is the
embedding's has a copy of its own, as in any pipeline. Micro-batches run by 1F1B (Narayanan et al., SC 2021, section
2.2). ``torch.distributed.pipelining`` keeps buffers for every micro-batch: for what comes in, and for the gradient of
what goes out. Those that no plan counts are taken from the device's budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from chunkc.distributed.stages import StagePlace
from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.scenarios.models.transformer import Head, Transformer

_EMBEDDINGS: Final = {"gpt2": ("wte", "wpe"), "bert": ("embeddings",)}
_TOKENS: Final = ("embed_tokens",)
_BEHIND_LAYERS: Final = {"gpt2": "ln_f", "bert": "pooler"}
_NORM: Final = "norm"
_LIKE_LLAMA: Final = ("llama", "mistral", "qwen2", "qwen3")
KINDS: Final = ("bert", "gpt2", *_LIKE_LLAMA)
"""Architectures (``model_type``) that can be divided into stages."""
_HEADS: Final = {"bert": (Head.MASKED, Head.CLASSIFICATION)}


@dataclass(frozen=True, slots=True)
class Stage(Transformer):
    """One stage of a model: ``config`` has the stage's own layers. ``number`` counts from 0."""

    number: int = 0
    num_stages: int = 1

    @staticmethod
    def of(model: Transformer, number: int, num_stages: int) -> Stage:
        """Stage ``number`` of ``model``.

        Raises:
            ChunkcError: for an architecture, a head or a mask whose stages are not known, and for fewer layers than
                stages.
        """
        kind = str(model.config["model_type"])
        if kind not in KINDS or model.head not in _HEADS.get(kind, (Head.CAUSAL,)):
            raise ChunkcError(
                f"{model.label} ({kind}, {model.head}) is not divided into stages of a pipeline (pp): that is built "
                f"for {', '.join(KINDS)}. Plan each stage as a model of your own, without pp"
            )
        whole = model.configuration()
        if kind == "bert" and whole.is_decoder:
            raise ChunkcError(
                f"{model.label} is a decoder (is_decoder), whose mask stages of a BERT would not make: leave pp out"
            )
        if whole.num_hidden_layers < num_stages:
            raise ChunkcError(
                f"pp={num_stages}: {model.label} has {whole.num_hidden_layers} layers, one a stage or more"
            )
        first, end = (place * whole.num_hidden_layers // num_stages for place in (number, number + 1))
        config = model.config_of(end - first)
        if getattr(whole, "layer_types", None):
            config["layer_types"] = list(whole.layer_types[first:end])
        return Stage(model.label, config, model.head, number, num_stages)

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    @property
    def title(self) -> str:
        return f"{self.label}, stage {self.number + 1} of {self.num_stages}"

    @property
    def capture_key(self) -> str:
        """That of all stages between the first and the last is the same, where they have as many layers."""
        number = 0 if self.is_first else 2 if self.is_last else 1
        return repr(replace(self, number=number, num_stages=3))

    @property
    def place(self) -> StagePlace:
        return StagePlace(self.number + 1, self.num_stages, 1)

    @property
    def num_own_layers(self) -> int:
        """Layers of this stage."""
        return int(self.configuration().num_hidden_layers)

    def in_flight(self, accumulate: int) -> int:
        """Micro-batches in flight by 1F1B: one for each stage from this one on, where there are as many."""
        return min(accumulate, self.num_stages - self.number)

    def hidden_nbytes(self, batch: int, sequence: int, dtype: torch.dtype | str, hw: Hardware) -> int:
        """Bytes of the hidden states of one micro-batch, in the compute dtype of fp32 parameters."""
        computed = hw.compute_dtype if dtype == "auto" else dtype
        found = getattr(torch, computed) if isinstance(computed, str) else computed
        return batch * sequence * int(self.configuration().hidden_size) * int(found.itemsize)

    def buffers_nbytes(self, batch: int, sequence: int, accumulate: int, dtype: torch.dtype | str, hw: Hardware) -> int:
        """Bytes of the buffers of all micro-batches, without the inputs in flight, which plans count."""
        num_inputs = 0 if self.is_first else accumulate - self.in_flight(accumulate)
        num_gradients = 0 if self.is_last else accumulate
        return (num_inputs + num_gradients) * self.hidden_nbytes(batch, sequence, dtype, hw)

    def build(self, *, recompute: bool = False) -> StageModule:
        """The stage's layers on the meta device, in training mode; errors as of `Transformer.build`."""
        return StageModule(Transformer.build(self, recompute=recompute), is_first=self.is_first, is_last=self.is_last)

    def inputs(self, batch: int, sequence: int, num_slices: int = 1) -> dict[str, torch.Tensor]:
        """Tokens, int64 [batch, sequence], or hidden states, float32 [batch, sequence, width], and labels.

        On the meta device; of all but the last stage there are no labels.
        """
        found = Transformer.inputs(self, batch, sequence, num_slices)
        if not self.is_last:
            del found["labels"]
        if not self.is_first:
            width = int(self.configuration().hidden_size)
            del found["input_ids"]
            found["hidden"] = torch.empty(batch, sequence, width, device="meta", requires_grad=True)
        return found


class StageModule(nn.Module):
    """The layers of one stage: ``model`` of transformers without what other stages have."""

    def __init__(self, model: Any, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        base, kind = model.base_model, str(model.config.model_type)
        if not is_first:
            for name in _EMBEDDINGS.get(kind, _TOKENS):
                setattr(base, name, None)
        if not is_last:
            name = _BEHIND_LAYERS.get(kind, _NORM)
            setattr(base, name, None if kind == "bert" else nn.Identity())
        self.model: Any = model if is_last else base
        self._kind = kind
        self.train(model.training)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [batch, sequence, width]; with ``labels`` the loss []."""
        base = self.model if labels is None else self.model.base_model
        if hidden is None:
            found: torch.Tensor = base(input_ids=input_ids).last_hidden_state
        else:
            found = self._through(base, hidden)
        return found if labels is None else self._loss(found, labels)

    def _through(self, base: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The layers behind another stage. GPT-2's own forward would add positions again."""
        if self._kind == "bert":
            return base.encoder(hidden).last_hidden_state  # type: ignore[no-any-return]
        if self._kind != "gpt2":
            return base(inputs_embeds=hidden).last_hidden_state  # type: ignore[no-any-return]
        from transformers.masking_utils import create_causal_mask

        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        about = {"config": base.config, "inputs_embeds": hidden, "attention_mask": None, "past_key_values": None}
        mask = create_causal_mask(**about, position_ids=positions)
        for block in base.h:
            hidden = block(hidden, None, mask)
        return base.ln_f(hidden)  # type: ignore[no-any-return]

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        model = self.model
        if self._kind != "bert":
            logits = model.lm_head(hidden)
            return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)  # type: ignore
        if hasattr(model, "cls"):
            return nn.functional.cross_entropy(model.cls(hidden).flatten(0, 1), labels.flatten())
        logits = model.classifier(model.dropout(model.bert.pooler(hidden)))
        return nn.functional.cross_entropy(logits, labels)


def divided_module(model: nn.Module) -> nn.Module:
    """The module of transformers in a built model, which ranks along ``tp`` divide."""
    inner: nn.Module = model.model if isinstance(model, StageModule) else model
    return inner
