"""Low-rank adaptation (Hu et al., 2021, section 4.1) of the tiny Llama, by hand and by PEFT where it is installed."""

import importlib.util
from collections.abc import Callable

import torch
from models import CASES, Case, llama
from torch import nn

HAS_PEFT = importlib.util.find_spec("peft") is not None
RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj")


class Adapted(nn.Module):
    """``base(x) + ALPHA / RANK * B A x``; ``B`` is not zero at first, so that both matrices have gradients."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x)) * (ALPHA / RANK)
        return adapted


def adapt(model: nn.Module) -> nn.Module:
    """``model`` with all it has frozen and adapters at ``TARGETS``, in place."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in TARGETS and isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child))
    return model


def by_peft(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def checkpointed(model: nn.Module) -> nn.Module:
    adapted = adapt(model)
    adapted.config.use_cache = False  # else its first forward logs that it is, which breaks the graph
    adapted.activation_checkpointing_enable()
    adapted.disable_input_require_grads()  # a hook for frozen embeddings, which breaks the graph and nothing needs
    return adapted


def _case(name: str, change: Callable[[nn.Module], nn.Module]) -> Case:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return change(llama()).train()

    return Case(name, build, CASES["llama"].batches)


BY_HAND = _case("lora", adapt)
BY_PEFT = _case("lora by peft", by_peft)
CHECKPOINTED = _case("lora, checkpointed", checkpointed)
