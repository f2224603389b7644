"""Lightning's Trainer over a compiled model, as a strategy.

    trainer = Trainer(strategy=ChunkcStrategy("v100-240g"), precision="bf16-mixed", accumulate_grad_batches=4,
                      gradient_clip_val=1.0, devices=8)
    trainer.fit(module, loader)

The module that holds the parameters, ``module.model`` say, is compiled when Trainer sets the strategy up, before
``configure_optimizers`` is called: micro-batches by ``accumulate_grad_batches``, the compute dtype by ``precision``.
``training_step`` stays Python and calls the compiled module. Lightning neither moves nor wraps it, and gradients are
means over ranks by the plan. Clipping by norm is `chunkc.clip_grad_norm_`. Checkpoints are Lightning's, of whole
tensors: all ranks read them together, one writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from chunkc.api import compile
from chunkc.compiler.device_selection import HardwareLike
from chunkc.errors import ChunkcError
from chunkc.integrations.clipping import clip_whole_model, is_compiled
from chunkc.runtime.optim.optimizer import ChunkOptimizer

__all__ = ["ChunkcStrategy"]

_DTYPES: Final[Mapping[str, torch.dtype | str]] = MappingProxyType(
    {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
)


class ChunkcPrecision(Precision):
    """Arithmetic of the plan: nothing is cast here, and gradients are clipped where they lie.

    Attributes:
        models: the compiled ones.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision  # type: ignore[assignment]
        self.models: list[nn.Module] = []

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip the gradients of an optimizer; by the plan where it has all of a compiled model's."""
        parameters = list(self.main_params(optimizer))
        if clip_whole_model(self.models, parameters, float(clip_val)) is None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)


class ChunkcStrategy(DDPStrategy):
    """A strategy of ``lightning.pytorch.Trainer`` for models larger than the memory of the GPU.

    Args:
        hw: as for `chunkc.compile`.
        module: name of the attribute of the LightningModule that is compiled; by default the only one with parameters.
            It may be compiled already: then leave the other arguments out.
        compile_options: further options of ``chunkc.compile``, which win over Trainer's.
        named: as for Lightning's ``DDPStrategy``, so far as they concern how processes start and find each other.

    Raises:
        ChunkcError: for a precision or an option of Trainer that cannot be honoured; when Trainer sets the strategy up,
            for parameters outside of the compiled module and for optimizers that are not chunkc's.
    """

    def __init__(
        self,
        hw: HardwareLike = "auto",
        *,
        module: str | None = None,
        compile_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self._own_precision = ChunkcPrecision("32-true")
        super().__init__(**named)
        self._hw, self._module_name, self._compile_options = hw, module, dict(compile_options or {})

    @property
    def precision_plugin(self) -> Precision:
        """Clips by the plan; Trainer's ``precision`` says in which dtype the plan computes."""
        return self._own_precision

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is None:
            return
        name = str(precision_plugin.precision)
        if name not in _DTYPES:
            raise ChunkcError(
                f"ChunkcStrategy cannot honour precision={name!r}: use one of {', '.join(_DTYPES)}; a model that is in "
                "16 bits already is trained in its dtype with '32-true'"
            )
        self._own_precision = ChunkcPrecision(name)

    def _configure_launcher(self) -> None:
        """Start the other processes of several; one alone stays as it is."""
        if self.num_nodes * self.num_processes > 1:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """Join the job of several processes; one alone joins none."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    def setup(self, trainer: Any) -> None:
        """Compile the model, then let the LightningModule make its optimizers."""
        if self._layer_sync is not None:
            raise ChunkcError("sync_batchnorm=True replaces modules of a compiled model: leave it out")
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self._own_precision.models = [self._compile(trainer)]
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _compile(self, trainer: Any) -> nn.Module:
        whole = self._whole
        model = self._held_module(whole)
        if not is_compiled(model):
            is_fp32 = all(p.dtype is torch.float32 for p in model.parameters())
            dtype = _DTYPES[str(self._own_precision.precision)] if is_fp32 else "auto"
            options = {"dtype": dtype, "accumulate": trainer.accumulate_grad_batches} | self._compile_options
            compile(model, self._hw, **options)
        elif self._hw != "auto" or self._compile_options:
            raise ChunkcError(
                "the model was compiled already, so hw and compile_options= of ChunkcStrategy would be ignored: leave "
                "them out, or hand over the model before chunkc.compile"
            )
        managed = {id(p) for p in model.parameters()}
        outside = [name for name, p in whole.named_parameters() if id(p) not in managed]
        if outside:
            raise ChunkcError(
                f"parameters outside of the compiled module ({', '.join(outside[:5])}) would be in no plan: let one "
                "attribute of the LightningModule hold all of them"
            )
        return model

    def _held_module(self, whole: LightningModule) -> nn.Module:
        """The module to compile."""
        if self._module_name is not None:
            return whole.get_submodule(self._module_name)
        holders = [name for name, child in whole.named_children() if any(True for _ in child.parameters())]
        if len(holders) != 1:
            raise ChunkcError(
                f"{type(whole).__name__} has parameters in {', '.join(holders) or 'no attribute'}: let one attribute "
                'hold the model, or name it: ChunkcStrategy(module="...")'
            )
        return whole.get_submodule(holders[0])

    @property
    def _whole(self) -> LightningModule:
        if self.lightning_module is None:
            raise ChunkcError("ChunkcStrategy has no LightningModule yet: Trainer connects it in fit()")
        return self.lightning_module

    def model_to_device(self) -> None:
        """Move what is not compiled, metrics for example; the plan has placed the rest."""
        for child in self._whole.children():
            if not any(is_compiled(module) for module in child.modules()):
                child.to(self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        wrong = [type(o).__name__ for o in self.optimizers if not isinstance(o, ChunkOptimizer)]
        if wrong:
            raise ChunkcError(
                f"configure_optimizers() returned {', '.join(wrong)}: return chunkc.AdamW(self.parameters(), ...) or "
                "another of chunkc's optimizers, which step within the plan"
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """End what the strategy uses; model and states stay where the plan has them."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
