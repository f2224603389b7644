"""The public surface, frozen: a name or an option that comes or goes is a decision, made here."""

import dataclasses
import inspect
from typing import TypeVar, get_type_hints

import pytest
from torch import nn

import chunkc

NAMES = frozenset(
    {
        "AccumulationError",
        "Adam",
        "AdamW",
        "AdamW8bit",
        "BudgetError",
        "CaptureError",
        "CheckpointError",
        "ChunkcError",
        "DeviceMemoryError",
        "GradScaler",
        "Hardware",
        "HardwareError",
        "Lion",
        "Plan",
        "PlanError",
        "PlanNotReadyError",
        "RankError",
        "SGD",
        "ShapeLimitError",
        "clip_grad_norm_",
        "compile",
        "full_params",
        "graceful_exit",
        "load_checkpoint",
        "load_pretrained",
        "metrics",
        "plan",
        "plan_of",
        "record_timeline",
        "save_checkpoint",
        "save_safetensors",
        "simulate",
        "stats",
    }
)

# Parameters in order: a name, then its default unless it has none; those behind * are keyword-only.
SIGNATURES = {
    "compile": "model, hw='auto', *, dtype='auto', backend='inductor', chunk_size='auto', activations='auto', "
    "accumulate=1, in_flight=1, shard='all', mesh=None, reduce_dtype=None, fullgraph=False, example_inputs=None, "
    "passes=None, keep_fp32=(), reserve=0, loss_scale='dynamic', optimizer='adamw'",
    "plan": "model, hw='auto', *, example_inputs, world_size=None, dtype='auto', backend='inductor', "
    "chunk_size='auto', activations='auto', accumulate=1, in_flight=1, shard='all', mesh=None, reduce_dtype=None, "
    "passes=None, keep_fp32=(), reserve=0, loss_scale='dynamic', optimizer='adamw'",
    "plan_of": "model",
    "clip_grad_norm_": "model, max_norm, norm_type=2.0",
    "simulate": "plan, hw=None",
    "stats": "model",
    "metrics": "model",
    "record_timeline": "model, path, *, hw=None",
    "full_params": "model",
    "load_pretrained": "model, path, *, strict=False",
    "save_safetensors": "model, directory, *, max_shard_size='5GB'",
    "save_checkpoint": "directory, model, optimizer, scheduler=None, extra=None, *, asynchronous=False, keep=None, "
    "max_copied_nbytes=1073741824",
    "load_checkpoint": "directory, model, optimizer=None, scheduler=None",
    "graceful_exit": "*signals",
    "AdamW": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, *, max_grad_norm=None",
    "AdamW8bit": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, *, max_grad_norm=None",
    "Adam": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, *, max_grad_norm=None",
    "SGD": "params, lr=0.001, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, *, max_grad_norm=None",
    "Lion": "params, lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0, *, max_grad_norm=None",
    "GradScaler": "device=None, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, "
    "enabled=True",
    "GradScaler.scale": "self, outputs",
    "GradScaler.unscale_": "self, optimizer",
    "GradScaler.step": "self, optimizer, *args, **kwargs",
    "GradScaler.update": "self, new_scale=None",
    "Hardware.parse": "text",
    "Hardware.detect": "",
    "Plan.text": "self",
    "Plan.summary": "self",
    "Plan.save": "self, path",
    "Plan.load": "path",
    "BudgetError": "message, *, moment, tensors, missing_nbytes, min_device_nbytes, min_host_nbytes",
}


def test_the_names_of_the_package() -> None:
    assert set(chunkc.__all__) == NAMES
    assert len(chunkc.__all__) == len(NAMES)
    assert all(hasattr(chunkc, name) for name in NAMES)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    found: object = chunkc
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)
    assert _parameters(found) == SIGNATURES[path]


def _parameters(function: object) -> str:
    """The parameters without annotations, as ``inspect`` writes them."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


@pytest.mark.parametrize("name", sorted(n for n in NAMES if n.endswith("Error")))
def test_every_error_is_a_chunkc_error(name: str) -> None:
    assert issubclass(getattr(chunkc, name), chunkc.ChunkcError)


def test_a_plan_is_frozen() -> None:
    assert dataclasses.is_dataclass(chunkc.Plan)
    assert chunkc.Plan.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_compile_gives_back_the_class_of_the_model() -> None:
    """A type checker sees the methods of the user's own class."""
    hints = get_type_hints(chunkc.compile)
    assert hints["return"] is hints["model"]
    assert isinstance(hints["model"], TypeVar) and hints["model"].__bound__ is nn.Module
