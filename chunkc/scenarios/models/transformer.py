"""A transformers model from a configuration, of any depth, batch and length, on the meta device."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from chunkc.distributed.stages import StagePlace
from chunkc.errors import ChunkcError
from chunkc.files import FormatError, read_json, shown
from chunkc.hardware import Hardware

_DEPTH_KEYS: Final = {"gpt2": ("num_hidden_layers", "n_layer"), "bert": ("num_hidden_layers",)}
"""Of architectures whose layers are all alike, whatever the configuration says: what may hold their number.

Of two that are there transformers takes the first."""

CONFIG_MAX_NBYTES: Final = 2**24
_COUNT_KEYS: Final = (
    *("n_layer", "n_layers", "num_layers", "num_hidden_layers", "num_decoder_layers", "encoder_layers"),
    *("decoder_layers", "num_experts", "num_local_experts", "n_routed_experts"),
)
"""What configurations call the numbers of modules that are built one by one."""
_MAX_COUNT: Final = 4096
_DEFAULT_SEQUENCE: Final = 1024
_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length")


class Head(StrEnum):
    """The task a model is trained for, by the class of transformers that builds it."""

    CAUSAL = "AutoModelForCausalLM"
    MASKED = "AutoModelForMaskedLM"
    CLASSIFICATION = "AutoModelForSequenceClassification"


_HEAD_BY_SUFFIX: Final = {
    "ForCausalLM": Head.CAUSAL,
    "LMHeadModel": Head.CAUSAL,
    "ForMaskedLM": Head.MASKED,
    "ForSequenceClassification": Head.CLASSIFICATION,
}


@dataclass(frozen=True, slots=True)
class Transformer:
    """One model: ``config`` of transformers, ``model_type`` included, and a label that people know."""

    label: str
    config: Mapping[str, Any]
    head: Head

    @property
    def depth_key(self) -> str | None:
        """The entry of ``config`` that holds the number of layers, where all are alike; None elsewhere."""
        keys = _DEPTH_KEYS.get(str(self.config["model_type"]), ())
        return next((key for key in keys if isinstance(self.config.get(key), int)), None)

    @property
    def num_layers(self) -> int | None:
        """Layers, where all are alike; None elsewhere."""
        key = self.depth_key
        return None if key is None else int(self.config[key])

    @property
    def title(self) -> str:
        """``label``, and which part of the model it is."""
        return self.label

    @property
    def capture_key(self) -> str:
        """Equal for models whose captures are equal."""
        return repr(self)

    @property
    def place(self) -> StagePlace | None:
        """The stage of a pipeline that it is; None: a whole model."""
        return None

    def in_flight(self, accumulate: int) -> int:
        """Micro-batches, of ``accumulate``, whose forward has begun and whose backward has not ended, at most."""
        return 1

    def buffers_nbytes(self, batch: int, sequence: int, accumulate: int, dtype: torch.dtype | str, hw: Hardware) -> int:
        """Device bytes that are kept beside a plan for what goes between stages; ``dtype``: as of a scenario."""
        return 0

    @property
    def default_sequence(self) -> int:
        """1,024 tokens, or as many as the model has positions for."""
        return min([_DEFAULT_SEQUENCE, *self._lengths().values()])

    def _lengths(self) -> dict[str, int]:
        """The configuration's limits on the length of a sequence, by entry."""
        return {key: int(self.config[key]) for key in _LENGTH_KEYS if isinstance(self.config.get(key), int)}

    def with_depth(self, num_layers: int) -> Transformer:
        """The same model with another number of layers; ValueError where its layers are not all alike."""
        if self.depth_key is None:
            raise ValueError(f"{self.label} has no depth that can be changed: its layers differ")
        return replace(self, config=self.config_of(num_layers))

    def config_of(self, num_layers: int) -> dict[str, Any]:
        """``config`` with another number of layers, under one name."""
        names = ("num_hidden_layers", *_DEPTH_KEYS.get(str(self.config["model_type"]), ()))
        others = {key: value for key, value in self.config.items() if key not in names}
        return {**others, self.depth_key or names[0]: num_layers}

    def build(self, *, recompute: bool = False) -> nn.Module:
        """The model on the meta device, in training mode; ``recompute``: with a checkpoint around every layer.

        Raises:
            ChunkcError: when transformers is not installed, or refuses the configuration.
        """
        with self._building() as transformers, torch.device("meta"):
            model: nn.Module = getattr(transformers, self.head).from_config(self.configuration())
        if recompute:
            checkpoint_layers(model, self.label)
        return model.train()

    def configuration(self) -> Any:
        """The configuration as transformers has it, with what ``config`` leaves out; ChunkcError as `build`."""
        options = {key: value for key, value in self.config.items() if key != "model_type"} | {"use_cache": False}
        with self._building() as transformers:
            return transformers.AutoConfig.for_model(self.config["model_type"], **options)

    @contextmanager
    def _building(self) -> Iterator[Any]:
        """transformers, whose errors in the block are ChunkcError."""
        transformers = _transformers()
        try:
            yield transformers
        except ChunkcError:
            raise
        except Exception as error:  # each configuration and model checks what it is given in its own way
            raise ChunkcError(f"transformers cannot build {self.label}: {type(error).__name__}: {error}") from error

    def inputs(self, batch: int, sequence: int, num_slices: int = 1) -> dict[str, torch.Tensor]:
        """Tokens [batch, sequence] and labels, of tokens or of whole sequences, int64 on the meta device.

        ``num_slices``: of the sequences, of which one is handed in with its positions: [batch, sequence / num_slices].

        Raises:
            ChunkcError: when the model has too few positions, or slices differ in length.
        """
        for key, length in self._lengths().items():
            if sequence > length:
                raise ChunkcError(f"{self.label} takes at most {length} tokens ({key}), found {sequence}")
        if sequence % num_slices:
            raise ChunkcError(f"cp={num_slices} divides sequences into equal slices, and they have {sequence} tokens")
        tokens = torch.empty(batch, sequence // num_slices, dtype=torch.long, device="meta")
        of_sequences = self.head is Head.CLASSIFICATION
        labels = torch.empty(batch, dtype=torch.long, device="meta") if of_sequences else tokens
        found = {"input_ids": tokens, "labels": labels}
        if num_slices > 1:
            names = ("labels", "position_ids", *(("shift_labels",) if self.head is Head.CAUSAL else ()))
            found |= {name: torch.empty_like(tokens) for name in names}
        return found


def checkpoint_layers(model: object, label: str) -> None:
    """Have every layer of a transformers model computed again in backward, its activations not kept.

    Raises:
        ChunkcError: when ``model`` offers no such thing.
    """
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # since transformers 5, and before
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        raise ChunkcError(f"{label} has no layers that transformers could checkpoint; do so in the model itself")
    enable({"use_reentrant": False})


def from_config_file(path: str) -> Transformer:
    """The model of a Hugging Face ``config.json``, its class that of transformers by ``architectures``.

    Raises:
        ChunkcError: when the file is no such configuration, or its architecture is not one that can be trained here.
    """
    try:
        config = read_json(path, max_nbytes=CONFIG_MAX_NBYTES)
    except OSError as error:
        raise ChunkcError(f"cannot read {path}: {error.strerror}") from error
    except FormatError as error:
        raise ChunkcError(f"{path} is no configuration of a model: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ChunkcError(f"{path} is no configuration of a model: it has no model_type")
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    head = next((head for suffix, head in _HEAD_BY_SUFFIX.items() if name.endswith(suffix)), None)
    if head is None:
        known = ", ".join(f"*{suffix}" for suffix in _HEAD_BY_SUFFIX)
        raise ChunkcError(f"{path} names the architecture {shown(name or 'none')}; chunkc builds {known}")
    _check_counts(path, config)
    place = Path(path)
    label = place.parent.name if place.name == "config.json" and place.parent.name else place.stem
    return Transformer(label, config, head)


def _check_counts(path: str, config: Mapping[str, Any]) -> None:
    """Refuse numbers of positions, and of modules, built one by one, with which no model can be built."""
    for key in (*_COUNT_KEYS, *_LENGTH_KEYS):
        count, most = config.get(key), _MAX_COUNT if key in _COUNT_KEYS else None
        if isinstance(count, int) and not (1 <= count <= (most or count)):
            limit = f"from 1 to {most}" if most else "1 or more"
            raise ChunkcError(f"{path} is no configuration of a model: {key} must be {limit}, found {shown(count)}")


def _transformers() -> Any:
    """Import transformers, which takes seconds, when a model is built."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ChunkcError(
            "models by name and config.json are built by transformers, which is not installed: pip install "
            "'chunkc[hf]', or give the model as module:function"
        ) from error
