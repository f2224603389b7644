"""The public functions: compile a model, plan one without running it, and look at either."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from chunkc._torch_compat.core import Finalizer, without_weight_references
from chunkc._torch_compat.distributed import DeviceMesh
from chunkc.compiler.capture_session import Settings
from chunkc.compiler.compiled_model import CompiledModel, views_ahead
from chunkc.compiler.compiled_model import compiled_of as _compiled
from chunkc.compiler.device_selection import HardwareLike, at_hand, count_libraries, device_for, update_cores
from chunkc.compiler.full_params import full_params
from chunkc.compiler.keep_fp32 import fp32_modules
from chunkc.compiler.plan_ahead import plan_ahead
from chunkc.compiler.segment_compiler import Backend, SegmentCompiler
from chunkc.compiler.validation import (
    Examples,
    check_model,
    check_plannable,
    compute_dtype,
    examples_of,
    is_mixed,
    needs_scaling,
    param_infos,
    plan_options,
    reduction_nbytes,
    unique_params,
)
from chunkc.cost.rates import known_rates
from chunkc.distributed import job
from chunkc.distributed.agreement import Kind
from chunkc.distributed.slices import first_slice
from chunkc.distributed.stages import check_unscaled
from chunkc.errors import ChunkcError, PlanNotReadyError
from chunkc.hardware import Hardware
from chunkc.hardware.usable_memory import Budget
from chunkc.ir.actions import Stream
from chunkc.ir.schedule import ParamInfo
from chunkc.ir.tiers import Tier
from chunkc.passes import Activations, Pass, Target, budgets_of
from chunkc.progress import shown
from chunkc.report import Plan
from chunkc.runtime.devices.host_slab import map_private
from chunkc.runtime.model.grad_clipping import clip_together
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.params.module_hooks import attach
from chunkc.runtime.params.tensor_views import views_of
from chunkc.runtime.update.loss_scale import LossScale
from chunkc.scenarios.dividing import divided
from chunkc.scenarios.slicing import sliced_ahead
from chunkc.weights.initial import moved_buffers, share_buffers
from chunkc.weights.streamed import stream_saves

logger = logging.getLogger("chunkc")

M = TypeVar("M", bound=nn.Module)


def compile(  # the name that torch.compile taught users
    model: M,
    hw: HardwareLike = "auto",
    *,
    dtype: torch.dtype | str = "auto",
    backend: Backend = "inductor",
    chunk_size: int | str = "auto",
    activations: Activations = "auto",
    accumulate: int = 1,
    in_flight: int = 1,
    shard: str = "all",
    mesh: DeviceMesh | str | None = None,
    reduce_dtype: torch.dtype | None = None,
    fullgraph: bool = False,
    example_inputs: Examples | None = None,
    passes: Sequence[Pass] | None = None,
    keep_fp32: Sequence[str] = (),
    reserve: int = 0,
    loss_scale: float | str = "dynamic",
    optimizer: str = "adamw",
) -> M:
    """Compile ``model`` in place for training within the memory of ``hw``, and return the same object.

    The plan is made at the first training forward. Parameters become managed: their payloads live in chunks that move
    between host and device, and reading one gathers it. On a GPU the model takes its inputs there, and its buffers move
    there now; ``state_dict()`` gives parameters in host memory.

    Args:
        model: any module with floating-point parameters, in host memory or on the meta device. Those from the meta
            device must be given values (``chunkc.load_pretrained``, ``load_state_dict``, ``torch.nn.init``) before they
            are read; buffers from there are computed by the modules' own initialisation.
        hw: a machine such as ``"v100-240g"`` or ``"emulated-64m-2g"``, a ``Hardware``, a profile's path, or ``"auto"``.
        dtype: compute dtype. ``"auto"``: a 16-bit model keeps its dtype, an fp32 model is trained in mixed precision.
        backend: how segments are compiled.
        chunk_size: elements per chunk, or ``"auto"``.
        activations: what forward saves for backward is kept on the device (``"keep"``), computed again in backward
            (``"recompute"``), or goes to host memory until then (``"offload"``: all layers' but the last ones').
            ``"auto"`` takes what simulates fastest. Where the machine's rates are not known it keeps what fits,
            computes the rest again, and moves what fits in no other way.
        accumulate: backwards whose gradients may add up before a step, in compute dtype, as ``param.grad`` does; scale
            the losses yourself. A step may come earlier. More than one takes host (or device) memory for the gradients,
            which otherwise overlay the parameters. One more backward raises ``AccumulationError``.
        in_flight: micro-batches of a step whose forward has begun and whose backward has not ended, at most: 1 in a
            plain loop, ``num_stages - stage`` in a pipeline by the schedule 1F1B, all of ``accumulate`` by GPipe. What
            each saves for backward is planned for; with more of them, the plan is made again, or BudgetError raised.
        shard: over several nodes, ``"all"``: all ranks divide the model data; ``"node"``: those of a node do, and every
            node has all of it, so that only gradients go between nodes.
        mesh: the ranks by dimension, a ``DeviceMesh`` or a text such as ``"dp_shard=2,tp=4"``: those that copy model
            data (``dp_replicate``), that divide it (``dp_shard``), that compute one forward together (``tp``), and
            stages of a pipeline (``pp``; ``model`` is then the stage that this rank trains, or one of them). None: as
            ``shard`` says. With ``tp`` a model of transformers is divided here, by the plan of its architecture, and
            others were parallelised over ``mesh["tp"]`` by torch's ``parallelize_module``; ranks along ``tp`` take the
            same batch, others batches of their own.
        reduce_dtype: in which gradients of the ranks are added up. None: as the backend does it, NCCL in their own
            dtype, gloo in float32; ``torch.float32``: in that by NCCL, too, through 32 MiB of the device's memory.
        fullgraph: refuse forwards that break into several graphs.
        example_inputs: shapes that are to come, as a list with the inputs of one training forward for each: a tuple by
            position, or a dict by keyword. Their plans are made before the first forward, over one layout; BudgetError
            is raised there when no layout serves all. Their contents are not used. One tuple or dict is one shape.
        passes: the pipeline to use instead of ``chunkc.passes.PIPELINE``.
        keep_fp32: patterns of parameter names (``"*norm*"``, ``"*.gate.weight"``) whose modules compute in fp32: their
            inputs are cast to it, their outputs back. For normalisations and routers of a model in 16 bits.
        reserve: device bytes to leave alone.
        loss_scale: ``"dynamic"``: gradients in fp16 are scaled by the rules and defaults of torch.amp.GradScaler; a
            number: always by that. A step with an infinite or NaN gradient changes nothing, and ``param.grad`` shows
            gradients unscaled. Compute the loss inside the forward, or in fp32: what it divides by outside in fp16 is
            lost before it is scaled (or use `chunkc.GradScaler`).
        optimizer: ``"adamw"``, ``"adam"``, ``"adamw8bit"``, ``"sgd"`` (with momentum or without) or ``"lion"``: whose
            states the plan makes room for. An optimizer of chunkc's made before the first forward says it by itself.

    Raises:
        ChunkcError: for a model or an option that cannot be honoured; the model is unchanged then.
        HardwareError: for an ``hw`` that cannot be used.
    """
    examples = examples_of(example_inputs)
    options = plan_options(chunk_size, activations, accumulate, in_flight, optimizer)
    check_model(model)
    job.join()
    machine, device = device_for(hw)
    ranks_by_dim = job.lay_out(mesh, machine, shard)
    name = type(model).__name__
    with divided(model, mesh, ranks_by_dim, device.torch_device.type):
        views = views_of(model, ranks_by_dim)
        reserve += reduction_nbytes(reduce_dtype, machine, machine.num_gpus, ranks_by_dim.num_replicas)
        params = list(unique_params(model))
        computed = compute_dtype(dtype, params, machine)
        in_fp32 = fp32_modules(model, keep_fp32, computed)
        infos = param_infos(model, computed, in_fp32.params)
        factor = _loss_scale(loss_scale, infos)
        if factor is not None:
            check_unscaled(ranks_by_dim)
        if mixed := is_mixed(params, computed):
            logger.info("%s is trained in mixed precision: %s with fp32 master parameters", name, computed)
        compiler = SegmentCompiler.of(backend)
        ranks = job.make_ranks(device.torch_device, ranks_by_dim, map_private, adds_in_float32=reduce_dtype is not None)
        if ranks.of_job.job_size > 1:
            with ranks.agreement_scope():
                count_libraries(device)
        cores = update_cores(device, ranks)
        target = Target(
            model=name,
            hw=str(machine),
            budgets={
                Tier.DEVICE: Budget(device.device_budget_nbytes, device.overhead_nbytes, device.leaves_slack),
                Tier.HOST: Budget(device.host_budget_nbytes, device.kept_host_nbytes),
            },
            world_size=ranks_by_dim.num_sharing,
            rank=ranks.shard_rank,
            num_replicas=ranks_by_dim.num_replicas,
            rates=known_rates(at_hand(machine, device, cores, ranks)),
            runs_inline=machine.emulated,
            mesh=ranks_by_dim.dims,
        ).less({Tier.DEVICE: reserve})
        settings = Settings(
            target=target,
            options=replace(options, tracks_grad_norm=factor is not None, scales=factor is not None),
            cast_inputs=computed if mixed else None,
            compiler=compiler,
            passes=passes,
            fullgraph=fullgraph or views.is_any or ranks.context is not None,
            ranks_per_node=machine.gpus_per_node,
            in_fp32=in_fp32,
            examples=examples,
        )
        # rates decide where updates run, which rounds
        alike = [str(target.rates)] if ranks_by_dim.num_sharing < len(ranks_by_dim.ranks) or ranks.context else []
        ranks.agree(
            Kind.COMPILE,
            lambda: [f"{machine.num_gpus} devices, {machine.gpu}", str(settings.options), *map(str, infos), *alike],
        )
        if cores is not None:
            device.use_cores(cores)
        buffers = moved_buffers(model, device.torch_device)
        with without_weight_references(model.modules()), views.installed(ranks) as shards:
            params = list(unique_params(model))
            runtime = ModelRuntime(infos, params, device, options.accumulate, ranks)
        runtime.parameters.shards = {i: shards[p] for i, p in enumerate(params) if p in shards}
        runtime.parameters.state_spec = options.state_spec
        if factor is not None:
            runtime.clipping.scale_by(LossScale(device.torch_device, factor, is_dynamic=loss_scale == "dynamic"))
        for module, key, buffer in buffers:
            module._buffers[key] = buffer
        share_buffers(model, ranks)
        in_fp32.attach()
        compiled = CompiledModel(model, runtime, settings)
        attach(model)
        stream_saves(model)
        compiled.enter()
        Finalizer(model, runtime.close_from_host)
        if ranks.line is not None:
            ranks.line.count()
    return model


def plan(
    model: nn.Module,
    hw: HardwareLike = "auto",
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    world_size: int | None = None,
    dtype: torch.dtype | str = "auto",
    backend: Backend = "inductor",
    chunk_size: int | str = "auto",
    activations: Activations = "auto",
    accumulate: int = 1,
    in_flight: int = 1,
    shard: str = "all",
    mesh: DeviceMesh | str | None = None,
    reduce_dtype: torch.dtype | None = None,
    passes: Sequence[Pass] | None = None,
    keep_fp32: Sequence[str] = (),
    reserve: int = 0,
    loss_scale: float | str = "dynamic",
    optimizer: str = "adamw",
) -> Plan:
    """Plan the training of ``model`` on ``hw``: nothing runs or is allocated, the model stays as it is.

    Nothing is compiled either. With ``backend="inductor"`` the bytes of activations are an estimate of what fused
    segments take, with a margin (``plan.memory.is_estimate``); ``plan_of`` after the first call states theirs. A run
    that clips measures gradients: its plan has norms, a decision and their bytes. With a loss scale this one has too.

    For a GPU, attention counts as the kernel that PyTorch takes there (`chunkc.capture.attention`), with what it saves
    and its workspace. An emulated run takes that of the CPU, with dropout operator by operator: another digest.

    Arguments that are not named below are those of ``compile``.

    Args:
        example_inputs: a dict of keyword or a tuple of positional inputs of one forward (one micro-batch); with
            ``cp``, a slice of its sequences.
        world_size: ranks to plan for; default: the GPUs of ``hw``.
        mesh: as of ``compile``, for these ranks, without ``pp``. A model with ``tp`` needs no job: it may have been
            parallelised over a mesh of a fake process group (``init_process_group("fake")``).

    Raises:
        BudgetError: when the model does not fit; it says what would.
        CaptureError: when its forward is no single graph that can be trained.
        ChunkcError: for a model or an option that cannot be honoured.
    """
    options = plan_options(chunk_size, activations, accumulate, in_flight, optimizer)
    check_plannable(model)
    machine = Hardware.of(hw)
    ranks = job.lay_out_ahead(mesh, machine, shard, world_size)
    views = views_ahead(model, ranks)
    num_ranks = len(ranks.ranks)
    reserve += reduction_nbytes(reduce_dtype, machine, num_ranks, ranks.num_replicas)
    target = Target(
        model=type(model).__name__,
        hw=str(machine),
        budgets=budgets_of(machine),
        world_size=ranks.num_sharing,
        num_replicas=ranks.num_replicas,
        rates=known_rates(machine) if machine.num_gpus == num_ranks else None,
        runs_inline=machine.emulated,
        mesh=ranks.dims,
    ).less({Tier.DEVICE: reserve})
    computed = compute_dtype(dtype, list(unique_params(model)), machine)
    compiled = getattr(model, "_compiled_call_impl", None)
    resting = compiled.settings.in_fp32.resting() if isinstance(compiled, CompiledModel) else nullcontext()
    with resting, views.lent(), sliced_ahead(model, ranks), shown(is_first_rank=job.is_first_rank()):
        in_fp32 = fp32_modules(model, keep_fp32, computed)
        factor = _loss_scale(loss_scale, param_infos(model, computed, in_fp32.params))
        return plan_ahead(
            model,
            target,
            replace(options, tracks_grad_norm=factor is not None, scales=factor is not None),
            example_inputs=example_inputs,
            dtype=computed,
            in_fp32=in_fp32,
            backend=backend,
            passes=passes,
            gpu=machine.compute_capability,
            context=first_slice(ranks),
        )


def plan_of(model: nn.Module) -> Plan:
    """The plan that the latest training forward of a compiled model runs.

    Raises:
        PlanNotReadyError: before the first training forward.
    """
    executor = _compiled(model).runtime.executor
    if executor is None and _compiled(model).breaks.reasons:
        raise PlanNotReadyError(
            "the forward breaks into several graphs, whose plan is made at the first step() of chunkc's "
            "optimizer; there was none yet"
        )
    if executor is None:
        raise PlanNotReadyError("the plan is made at the first training forward; run one, or use chunkc.plan")
    return Plan.of(executor.plan)


def stats(model: nn.Module) -> dict[str, int]:
    """Numbers of the latest step with all its micro-batches, in bytes, and counts since warm-up.

    Pending work is finished first. ``num_foreign_steps`` are updates by other optimizers than chunkc's, each noticed at
    the next forward. Planned numbers are the latest forward's plan, with as many micro-batches as ``accumulate``
    declares; the measured peak is that of the latest forward and its backward. Of a forward that breaks, the planned
    peak is the highest among its graphs.

    Raises:
        PlanNotReadyError: before the first training forward.
    """
    plan, compiled = plan_of(model), _compiled(model)
    compiled.runtime.parameters.drain()
    ran = [graph.plan for graph in compiled.runtime.ran if graph.plan is not None]
    return {
        "budget_nbytes": plan.memory.device_budget_nbytes,
        "planned_peak_nbytes": max(p.memory.device_peak_nbytes for p in (plan, *ran)),
        "measured_peak_nbytes": compiled.runtime.accounting.measured_peak_nbytes,
        "host_nbytes": plan.memory.host_nbytes,
        "model_data_nbytes": plan.layout.model_data_nbytes(),
        "h2d_nbytes": compiled.runtime.moved_nbytes(Stream.H2D),
        "d2h_nbytes": compiled.runtime.moved_nbytes(Stream.D2H),
        "comm_nbytes": compiled.runtime.moved_nbytes(Stream.COMM),
        "planned_h2d_nbytes": plan.moved_nbytes(Stream.H2D),
        "planned_d2h_nbytes": plan.moved_nbytes(Stream.D2H),
        "planned_comm_nbytes": plan.moved_nbytes(Stream.COMM),
        "saved_nbytes": sum(value.nbytes for value in plan.saved),
        "moved_saved_nbytes": plan.copies_nbytes,
        "num_foreign_steps": compiled.runtime.parameters.foreign.num_steps,
        **compiled.counts_since_warm_up(),
    }


def clip_grad_norm_(model: nn.Module | Sequence[nn.Module], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip a compiled model's gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_`` does.

    Call it between ``backward()`` and ``step()``. The norm is over all parameters that have a gradient, whichever
    optimizers hold them. The step multiplies gradients by ``max_norm / (norm + 1e-6)``, at most 1, and ``param.grad``
    shows them so; ``zero_grad()`` begins anew. A further micro-batch adds its gradients, unclipped, to the clipped
    ones: clip once before each step.

    From the forward after the first call on, gradients are measured on the device as they land, and nothing waits; so
    does ``max_grad_norm=`` of an optimizer from its first step on, for which the plan makes room when it is given
    before the first forward. All gradients are read, and waited for, by the first call, for norms of another type than
    2, for gradients that were written to or set to None, for forwards that break into several graphs, and where the
    plan has no room for the tables of norms.

    Args:
        model: from `compile`; stages of a pipeline are clipped by the norm of all stages, and a rank that trains
            several hands over all of them, in any order.
        max_norm: of all gradients together.
        norm_type: of the norm; any that ``torch.linalg.vector_norm`` knows.

    Returns:
        The norm before clipping: float32 [], on the model's device. To read it waits for backward.

    Raises:
        ChunkcError: when the gradients were already stepped, and for some of a rank's stages.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ChunkcError("there is no model whose gradients could be clipped")
    return clip_together([_compiled(each).runtime.clipping for each in models], float(max_norm), float(norm_type))


def _loss_scale(loss_scale: float | str, infos: Sequence[ParamInfo]) -> float | None:
    """The scale to begin with; None where none is needed."""
    if loss_scale == "dynamic":
        return 2.0**16 if needs_scaling(infos) else None
    if not isinstance(loss_scale, int | float) or not 0.0 < loss_scale < float("inf"):
        raise ChunkcError(f"loss_scale={loss_scale!r}: give a positive number, or 'dynamic'")
    return float(loss_scale)


__all__ = ["clip_grad_norm_", "compile", "full_params", "plan", "plan_of", "stats"]
