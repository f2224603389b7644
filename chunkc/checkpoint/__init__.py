"""Checkpoints of a training run: saved whole or not at all, checked, and resumed to the bit.

`directory` makes saves atomic, `storage` and `planners` are the two ends of torch.distributed.checkpoint, `shares` says
what a rank has of a tensor, `contents` what is saved, `encode` how other values are, and `restore` puts all back.

Several ranks write one checkpoint: rank 0 makes its folder, each flushes files of its own, and rank 0 then makes it the
newest. A failure of one rank fails all. An asynchronous save agrees on its own thread and process group.
"""

from __future__ import annotations

import logging
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkc.checkpoint import directory as folders
from chunkc.checkpoint.contents import Contents, Stateful, check_optimizer, gather, runtime_of
from chunkc.checkpoint.directory import Manifest
from chunkc.checkpoint.index import INDEX_NAME
from chunkc.checkpoint.objects import OBJECTS_NAME, read_objects
from chunkc.checkpoint.planners import save
from chunkc.checkpoint.restore import Fit, check_optimizer_fits, fit_model, load_states, resume, write_model
from chunkc.checkpoint.storage import FileDigest, SafetensorsReader, SafetensorsWriter, write_json
from chunkc.distributed.agreement import Kind
from chunkc.distributed.coordination import all_do, exchange, of_first
from chunkc.distributed.stages import named_stage
from chunkc.errors import CheckpointError, ChunkcError
from chunkc.files import FormatError
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.optim.optimizer import ChunkOptimizer
from chunkc.weights.tensors import memory_of

logger = logging.getLogger("chunkc")

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Attributes:
        step: optimizer steps that the run had taken.
        extra: what ``save_checkpoint`` was given.
        versions: of chunkc, torch and Python when it was saved.
    """

    path: Path
    step: int
    extra: Any
    versions: Mapping[str, str]


def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: ChunkOptimizer,
    scheduler: Stateful | None = None,
    extra: Any = None,
    *,
    asynchronous: bool = False,
    keep: int | None = None,
    max_copied_nbytes: int = 2**30,
) -> Future[Path]:
    """Save all that a run needs to go on exactly, as a new checkpoint in ``directory``.

    Saved are parameters (fp32 masters where there are any), buffers, moments and step counts by parameter name, the
    optimizer's groups, the scheduler, all global random number generators, and ``extra``. A checkpoint appears under
    its name when all of it is on disk; until then ``load_checkpoint`` finds the one before. One run at a time saves
    into a directory, and each stage of a pipeline into one of its own.

    All ranks that train the model call this, with a directory that all of them see: each writes what stands in its own
    chunks, and its generators; buffers, the scheduler and ``extra`` are rank 0's. Tensors are whole in it, also those
    of which ranks along ``tp`` have parts.

    Args:
        scheduler: whatever has ``state_dict`` and ``load_state_dict`` over plain values and tensors.
        extra: for example the position in the data: numbers, strings, bytes, lists, tuples, dicts, tensors and NumPy
            arrays, nested up to 64 deep.
        asynchronous: write while training goes on; the checkpoint is that of this call, to the bit. Each chunk is read
            before its next update, or copied aside by that update. A model that has not been trained yet is written
            before this returns. The next save waits for this one.
        keep: remove all but the last ``keep`` complete checkpoints of the directory afterwards; default: none goes.
        max_copied_nbytes: host memory for chunks copied aside. When it is full, updates wait for the disk.

    Returns:
        a future of the checkpoint's path, done unless ``asynchronous``. The process does not exit before it is; with
        several ranks, wait for it before you destroy the job's process group.

    Raises:
        ChunkcError: when gradients wait to be stepped, an update has failed, or a value is of a kind that a checkpoint
            does not hold; nothing is written then.
        CheckpointError: when it cannot be written, or the directory is another stage's (of an asynchronous save: by the
            future, and by the next call).
        RankError: when the ranks do not all save the same, or one of them has ended.
    """
    with memory_of(model).ranks.agreement_scope():
        if keep is not None and keep < 1:
            raise ChunkcError(f"keep={keep}: give the number of checkpoints to keep, 1 or more")
        runtime, root = runtime_of(model), Path(directory)
        error = _finish_last(runtime)
        if error is not None:
            raise error
        agreed = [f"{directory=!s}", f"{asynchronous=}", f"{keep=}"]

        def gather_and_save() -> Future[Path]:
            steps = check_optimizer(optimizer, runtime)
            contents = gather(model, runtime, steps, scheduler, extra, max_copied_nbytes, agreed)
            work = partial(write_checkpoint, root, model, runtime, contents, keep)
            try:
                if asynchronous and contents.is_lasting:
                    runtime.saving = _beside(work)
                    return runtime.saving
                done: Future[Path] = Future()
                done.set_result(work())
                return done
            except BaseException:
                runtime.parameters.end_snapshot(contents.reader)  # updates would wait for a reader that never comes
                raise

        return runtime.transactions.run(gather_and_save)


def _beside(work: Callable[[], Path]) -> Future[Path]:
    """Run ``work`` on a thread of its own, which the process waits for before it exits."""
    executor = ThreadPoolExecutor(1, "chunkc-checkpoint")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def load_checkpoint(
    directory: str | Path, model: nn.Module, optimizer: ChunkOptimizer | None = None, scheduler: Stateful | None = None
) -> Checkpoint:
    """Go on from the newest checkpoint in ``directory``, or from the one that ``directory`` is.

    Every file is compared with its checksum and everything with the model first; nothing has changed when this raises
    for either. Budget, chunk size, compute dtype, the dtype handed over, the machine, the number of ranks and the mesh
    may differ from the run that saved; names, shapes, tied parameters and the optimizer's groups may not. On the same
    machine, with the same options, training goes on to the bit. No file is unpickled.

    All ranks call this; each reads what stands in its own chunks. A rank whose batches nobody took keeps its generators
    of random numbers.

    Args:
        model: compiled; before its first step, or after any.
        optimizer: takes over groups, states and step counts. Without one only the model is loaded: no states, no
            generators of random numbers.
        scheduler: of the kind that was saved; needed with an optimizer if there was one.

    Raises:
        CheckpointError: when there is none, a file is damaged (it is named, and the complete checkpoint before it is
            offered), or it is of another stage of a pipeline or does not fit the model.
        ChunkcError: when gradients wait to be stepped, or the model is not compiled.
    """
    started_s = time.perf_counter()
    with memory_of(model).ranks.agreement_scope():
        runtime = runtime_of(model)
        error = _finish_last(runtime)
        if error is not None:
            logger.warning("the asynchronous save before this load had failed: %s", error)
        lines = [f"{directory=!s}", f"optimizer: {type(optimizer).__name__}", f"scheduler: {type(scheduler).__name__}"]
        runtime.ranks.agree(Kind.LOAD, lambda: lines)
    runtime.state.to_cold()  # ranks exchange here, and no more while each of them reads
    ranks = runtime.ranks
    path = of_first(ranks, lambda: _find(Path(directory)))
    manifest = folders.verify(path, ranks)
    fit, objects, groups = all_do(ranks, lambda: _compare(path, manifest, model, runtime, optimizer, scheduler))
    resumed = None if optimizer is None else scheduler

    def write() -> None:
        all_do(ranks, lambda: load_states(fit, objects, model, resumed))
        all_do(ranks, lambda: write_model(fit, objects))
        if optimizer is not None:
            resume(fit, objects, check_optimizer(optimizer, runtime), groups)

    runtime.transactions.run(write)
    if ranks.is_first_of_job:
        logger.info("loaded %s in %.1f s", path, time.perf_counter() - started_s)
    return Checkpoint(path, manifest.step, objects["extra"], manifest.versions)


def _compare(
    path: Path,
    manifest: Manifest,
    model: nn.Module,
    runtime: ModelRuntime,
    optimizer: ChunkOptimizer | None,
    scheduler: Stateful | None,
) -> tuple[Fit, dict[str, Any], list[dict[str, Any]]]:
    """Compare a checkpoint with the model, and with optimizer and scheduler if there is an optimizer.

    Returns the fit, the objects, and the optimizer's groups (none without an optimizer).
    """
    stage = runtime.ranks.stage
    if manifest.stage != stage:
        raise CheckpointError(
            f"{path} is of {named_stage(manifest.stage)}, and {named_stage(stage)} was to be loaded: each stage of a "
            "pipeline goes on from a checkpoint of its own, over a mesh with as many stages",
            path=path,
        )
    omitted = {INDEX_NAME, OBJECTS_NAME} - manifest.files.keys()
    if omitted:
        raise folders.damaged(path, {folders.MANIFEST_NAME: f"without {', '.join(sorted(omitted))}"})
    reader = SafetensorsReader(path, manifest.files.keys())
    try:
        objects = read_objects(path, reader)
    except OSError as error:
        raise folders.damaged(path, {OBJECTS_NAME: f"not readable ({error.strerror})"}) from error
    except FormatError as error:
        raise folders.damaged(path, {OBJECTS_NAME: f"not what a checkpoint holds: {error}"}) from error
    fit = fit_model(path, reader, model, runtime, objects)
    if optimizer is None:
        return fit, objects, []
    groups = check_optimizer_fits(fit, check_optimizer(optimizer, runtime), objects["optimizer"])
    if (scheduler is None) != (objects["scheduler"] is None):
        there, here = ("no", "one") if objects["scheduler"] is None else ("a", "none")
        raise fit.refuse(f"it holds {there} scheduler and {here} was given")
    return fit, objects, groups


def _find(directory: Path) -> Path:
    """The checkpoint that ``directory`` is, or the newest in it; CheckpointError when there is none."""
    try:
        if folders.is_checkpoint(directory):
            return directory
        path = folders.newest(directory)
        misnamed = [] if path is not None else folders.misnamed(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}", path=directory) from error
    if path is None:
        renamed = ", ".join(map(str, misnamed[:5]))
        hint = f"; these were renamed, so give the one that you mean: {renamed}" if misnamed else ""
        raise CheckpointError(f"{directory} holds no complete checkpoint{hint}", path=directory)
    return path


def _finish_last(runtime: ModelRuntime) -> BaseException | None:
    """Wait for a save under way, and return its exception, which nobody may have asked the future for."""
    last = runtime.saving
    if last is None:
        return None
    wait([last])
    runtime.saving = None  # not before, so that an interrupted wait forgets no save
    return last.exception()


def write_checkpoint(root: Path, model: nn.Module, runtime: ModelRuntime, contents: Contents, keep: int | None) -> Path:
    """Write a checkpoint and end the snapshot; ``model`` is held so that its memory stays."""
    started_s = time.perf_counter()
    try:
        path = _write_files(root, contents)
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint of step {contents.step} was written into {root}: {error}. Earlier ones are as they were",
            path=root,
        ) from error
    finally:
        runtime.parameters.end_snapshot(contents.reader)
    if contents.ranks.is_first_of_job:
        if keep is not None:
            folders.prune(root, keep)
        logger.info("saved %s, %.1f MB, in %.1f s", path, contents.nbytes / 1e6, time.perf_counter() - started_s)
    return path


def _write_files(root: Path, contents: Contents) -> Path:
    ranks = contents.ranks
    path = of_first(ranks, lambda: folders.begin(root, contents.step, contents.stage))
    try:
        exchange(ranks, lambda: _check_folder(root, path, contents))
        writer = SafetensorsWriter(path, ranks.job_rank)
        save(writer, contents.kept, ranks)
        written = exchange(ranks, lambda: writer.digests)
        return of_first(ranks, lambda: _publish(path, contents, {k: v for part in written for k, v in part.items()}))
    except BaseException:
        if ranks.is_first_of_job:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _check_folder(root: Path, path: Path, contents: Contents) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"{path}, which rank 0 has made, is not there: give a directory on a file system that all ranks share",
            path=root,
        )
    free_nbytes = shutil.disk_usage(root).free
    if free_nbytes < contents.nbytes:
        raise CheckpointError(
            f"a checkpoint of {contents.nbytes} bytes does not fit into {root}, where {free_nbytes} are free: make "
            "room, or keep fewer (`keep=`)",
            path=root,
        )


def _publish(path: Path, contents: Contents, digests: Mapping[str, FileDigest]) -> Path:
    files = {**digests, OBJECTS_NAME: write_json(path / OBJECTS_NAME, contents.objects)}
    versions = {"chunkc": version("chunkc"), "torch": torch.__version__, "python": platform.python_version()}
    number = folders.WHOLE_FORMAT if contents.stage is None else folders.FORMAT
    return folders.commit(path, Manifest(number, contents.step, versions, files, contents.stage))
