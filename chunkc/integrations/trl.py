"""TRL's trainers over a compiled model: `ChunkcSFTTrainer` and `ChunkcDPOTrainer`.

    trainer = ChunkcSFTTrainer("my-model", args, train_dataset=..., peft_config=LoraConfig(...), hw="v100-240g")
    trainer.train()

They take what TRL's take, a path in place of a model and ``peft_config`` too, and ``hw=`` and ``compile_options=``.
TRL's trainers load the model, add adapters, and hand it to transformers' Trainer. `ChunkcTrainer` stands between the
two, so the model is compiled when it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from chunkc.compiler.device_selection import HardwareLike
from chunkc.errors import ChunkcError
from chunkc.integrations.hf import ChunkcTrainer

__all__ = ["ChunkcDPOTrainer", "ChunkcSFTTrainer"]


class ChunkcSFTTrainer(SFTTrainer, ChunkcTrainer):
    """``trl.SFTTrainer`` over a compiled model.

    Args:
        hw: as for `chunkc.compile`.
        compile_options: further options of it, which win over the arguments.

    Raises:
        ChunkcError: as `ChunkcTrainer`.
    """

    def __init__(
        self,
        *positional: Any,
        hw: HardwareLike | None = None,
        compile_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self.compile_by(hw, compile_options)
        super().__init__(*positional, **named)


class ChunkcDPOTrainer(DPOTrainer, ChunkcTrainer):
    """``trl.DPOTrainer`` over a compiled model.

    With ``peft_config`` the reference is the model without adapters. A second model as the reference would be in no
    plan: precompute its log-probabilities in place of it.

    Args:
        hw: as for `chunkc.compile`.
        compile_options: further options of it, which win over the arguments.

    Raises:
        ChunkcError: as `ChunkcTrainer`; for a reference that is a model of its own.
    """

    def __init__(
        self,
        *positional: Any,
        hw: HardwareLike | None = None,
        compile_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self.compile_by(hw, compile_options)
        super().__init__(*positional, **named)
        if self.ref_model is not None:
            raise ChunkcError(
                "the reference of ChunkcDPOTrainer would be a second model outside of the plan: pass peft_config=, so "
                "that it is the model without adapters, or precompute_ref_log_probs=True in DPOConfig"
            )
