"""A directory of checkpoints: each appears whole or not at all, and is checked before it is used.

    latest                   name of the newest complete checkpoint, replaced in one piece when that one is there
    00000003-step-150/       the third checkpoint saved here, after 150 steps
        manifest.json        format, versions, the stage of a pipeline, and size and SHA-256 of every other file
        ...
    .saving-...              under way, or left by a process that was killed; the next save removes it

Files and folder of a new checkpoint are flushed to disk (fsync), the folder is renamed, the directory flushed, and only
then ``latest`` changes: whenever the machine stops, what ``latest`` names is whole. Numbers only rise, so that names
have the order of saving, also when a run went back to an older step.

Each stage of a pipeline has a directory of its own. A save looks for checkpoints of other stages before it writes, and
again when its folder has its name: of two stages that begin one directory at a time, the later one finds the other.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import psutil

from chunkc.checkpoint.storage import FileDigest, digest_of, write_json
from chunkc.distributed.coordination import exchange
from chunkc.distributed.process_group import Ranks
from chunkc.distributed.stages import StagePlace, named_stage
from chunkc.errors import CheckpointError
from chunkc.files import Decoder, FormatError, flush_folder, read_json, synced_file

logger = logging.getLogger("chunkc")

WHOLE_FORMAT: Final = 1
FORMAT: Final = 2
"""Of checkpoints of stages, and the last that is read; others have `WHOLE_FORMAT`, which earlier versions read."""
MANIFEST_NAME: Final = "manifest.json"
LATEST_NAME: Final = "latest"
_MANIFEST_MAX_NBYTES: Final = 2**28
_LATEST_MAX_NBYTES: Final = 256
_NAME: Final = re.compile(r"(\d{8,})-step-(\d+)")
_ONE_EACH: Final = "each run, and each stage of a pipeline, saves into a directory of its own"
_SAVING: Final = re.compile(r"\.(?:saving|removing)-(?P<host>.*)-(?P<pid>\d+)-[^-]*-step-\d+")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        format: number of the format; a reader refuses those above its own.
        step: optimizer steps taken.
        versions: of chunkc, torch and Python when it was saved.
        files: size and checksum of every other file, by name.
        stage: of a pipeline; None, and left out of the document, for a model that is none.
    """

    format: int
    step: int
    versions: Mapping[str, str]
    files: Mapping[str, FileDigest]
    stage: StagePlace | None = None


@dataclass(frozen=True, slots=True)
class _SignedManifest:
    manifest: dict[str, Any]
    sha256: str


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints in ``root``, whose files all have their sizes, in the order of saving."""
    named = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return [path for path in sorted(named, key=_number) if _is_complete(path)]


def newest(root: Path) -> Path | None:
    """The checkpoint that ``latest`` names, whole or not; else the newest complete one, with a log line."""
    complete = max(checkpoints(root), key=_number, default=None)
    name = _pointed_to(root / LATEST_NAME)
    if name is not None and _NAME.fullmatch(name) and (root / name).is_dir():
        return root / name
    if name is not None and complete is not None:
        warning = "%s names no checkpoint (%.80r); the newest complete one is %s"
        logger.warning(warning, root / LATEST_NAME, name, complete)
    return complete


def _pointed_to(pointer: Path) -> str | None:
    """The name in ``latest``; None where there is none, empty where it is no file."""
    if not pointer.is_file():
        return "" if os.path.lexists(pointer) else None
    with pointer.open("rb") as file:
        return file.read(_LATEST_MAX_NBYTES).decode("utf-8", errors="replace").strip()


def misnamed(root: Path) -> list[Path]:
    """Folders of ``root`` that are checkpoints, with names that do not say their steps."""
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    manifests = [(path, _parse_manifest(path)[0]) for path in folders if not path.name.startswith(".")]
    return sorted(path for path, manifest in manifests if manifest is not None and not _is_named(path, manifest.step))


def _is_named(path: Path, step: int) -> bool:
    name = _NAME.fullmatch(path.name)
    return name is not None and int(name[2]) == step


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a checkpoint itself, whole or not, and no directory of checkpoints."""
    name = os.path.basename(os.path.realpath(path))
    return (path / MANIFEST_NAME).is_file() or (path.is_dir() and _NAME.fullmatch(name) is not None)


def before(path: Path) -> Path | None:
    """The newest complete checkpoint saved before ``path``."""
    return max((p for p in checkpoints(path.parent) if _number(p) < _number(path)), key=_number, default=None)


def begin(root: Path, step: int, stage: StagePlace | None = None) -> Path:
    """A new folder to write a checkpoint of ``stage`` into; what killed saves have left is removed.

    Raises:
        OSError: it cannot be made.
        CheckpointError: a folder has the name of ``latest``, or a checkpoint is of another stage.
    """
    _make(root)
    _refuse_other_stages(root, stage)
    pointer = root / LATEST_NAME
    if pointer.is_dir() and not pointer.is_symlink():
        raise CheckpointError(
            f"{pointer} is a folder, where a file is to name the newest checkpoint: give it another name, or save into "
            "another directory",
            path=root,
        )
    _remove_leftovers(root)
    taken = [_number(path) for path in root.iterdir() if _NAME.fullmatch(path.name)]
    path = _hidden(root, "saving", f"{max(taken, default=0) + 1:08d}-step-{step}")
    path.mkdir()
    return path


def commit(path: Path, manifest: Manifest) -> Path:
    """Make the folder of ``begin``, whose files are all on disk, the newest checkpoint; its final path.

    Raises:
        OSError: it cannot; the folder has its old name then, and ``latest`` names what it named.
        CheckpointError: another save has taken the name, or has saved another stage; just so.
    """
    body = asdict(manifest)
    if manifest.stage is None:
        del body["stage"]
    write_json(path / MANIFEST_NAME, sign(body))
    flush_folder(path)
    final = path.parent / "-".join(path.name.rsplit("-", 3)[1:])
    with _pointer_to(final) as pointer:
        _rename_to_new(path, final)
        try:
            _refuse_other_stages(final.parent, manifest.stage)
            flush_folder(path.parent)
            pointer.replace(final.parent / LATEST_NAME)
        except (OSError, CheckpointError):
            final.rename(path)
            raise
    flush_folder(final.parent)
    return final


def _rename_to_new(path: Path, final: Path) -> None:
    try:
        path.rename(final)
    except OSError as error:
        if not final.is_dir():
            raise
        raise CheckpointError(
            f"{final} was saved meanwhile by another run, or by another stage of a pipeline: {_ONE_EACH}",
            path=final.parent,
        ) from error


def _refuse_other_stages(root: Path, stage: StagePlace | None) -> None:
    for path in checkpoints(root):
        found = _parse_manifest(path)[0]
        if found is not None and found.stage != stage:
            raise CheckpointError(
                f"{path} is of {named_stage(found.stage)}, and {named_stage(stage)} was to be saved beside it: "
                f"{_ONE_EACH}",
                path=root,
            )


def prune(root: Path, keep: int) -> None:
    try:
        old = checkpoints(root)[:-keep]
    except OSError as error:
        logger.warning("old checkpoints could not be removed: %s", error)
        return
    for path in old:
        hidden = _hidden(root, "removing", path.name)
        try:
            path.rename(hidden)  # first, so that a checkpoint that is half removed is none
        except OSError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)
        shutil.rmtree(hidden, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; CheckpointError where it is missing, damaged or of a later format."""
    manifest, fault = _parse_manifest(path)
    if manifest is None:
        raise damaged(path, {MANIFEST_NAME: fault})
    if manifest.format > FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.format}, and this chunkc ({manifest.versions.get('chunkc')} saved it) reads "
            f"up to {FORMAT}: load it with that version or a later one",
            path=path,
        )
    if _NAME.fullmatch(path.name) and not _is_named(path, manifest.step):
        raise CheckpointError(
            f"{path} was renamed: its manifest says that it is of step {manifest.step}. Give it back that step, or a "
            "name that says none",
            path=path,
        )
    return manifest


def _parse_manifest(path: Path) -> tuple[Manifest | None, str]:
    try:
        signed = Decoder().decode(_SignedManifest, read_json(path / MANIFEST_NAME, max_nbytes=_MANIFEST_MAX_NBYTES))
        if sign(signed.manifest)["sha256"] != signed.sha256:
            return None, "changed since it was written"
        manifest = Decoder().decode(Manifest, _known_of(signed.manifest))
        for name in manifest.files:
            if Path(name).name != name or name == MANIFEST_NAME:
                raise FormatError(f"{name!r:.80} is no name of another file", "manifest.files")
        return manifest, ""
    except FileNotFoundError:
        return None, "missing"
    except OSError as error:
        return None, f"not readable ({error.strerror})"
    except FormatError as error:
        return None, f"not readable ({error})"


def _known_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A manifest of any format with the fields of this one."""
    number = body.get("format")
    if type(number) is int and number > FORMAT:
        known = {field.name: body[field.name] for field in fields(Manifest) if field.name in body}
        return known | {"stage": None}
    return {"stage": None, **body}


def verify(path: Path, ranks: Ranks | None = None) -> Manifest:
    """Compare every file of a checkpoint with the manifest, each rank a share of the files.

    Raises:
        CheckpointError: naming the files that differ and the checkpoint before; on all ranks.
    """
    ranks = ranks or Ranks()
    [manifest, *_] = exchange(ranks, lambda: read_manifest(path))
    share = list(manifest.files.items())[ranks.job_rank :: ranks.job_size]
    by_rank = exchange(ranks, lambda: {name: fault for name, d in share if (fault := _fault(path / name, d))})
    faults = {name: fault for of_rank in by_rank for name, fault in of_rank.items()}
    if faults:
        raise damaged(path, dict(sorted(faults.items())))
    return manifest


def damaged(path: Path, faults: Mapping[str, str]) -> CheckpointError:
    """The error for a checkpoint that cannot be used; ``faults`` by file."""
    previous = before(path) if _NAME.fullmatch(path.name) else None
    advice = "no complete checkpoint was saved before it"
    if previous is not None:
        advice = f"the one before it is complete: load_checkpoint({str(previous)!r}, ...)"
    listed = ", ".join(f"{name} is {fault}" for name, fault in faults.items())
    return CheckpointError(
        f"{path} is damaged: {listed}; {advice}", path=path, damaged=tuple(faults), previous=previous
    )


def _fault(path: Path, wanted: FileDigest) -> str | None:
    if not path.is_file():
        return "missing"
    try:
        nbytes = path.stat().st_size
        if nbytes != wanted.nbytes:
            return f"{nbytes} bytes long instead of {wanted.nbytes}"
        return None if digest_of(path) == wanted else "changed since it was written (its checksum differs)"
    except OSError as error:
        return f"not readable ({error.strerror})"


def _is_complete(path: Path) -> bool:
    manifest, _ = _parse_manifest(path)
    if manifest is None or not _is_named(path, manifest.step):
        return False
    files = manifest.files.items()
    return all((path / name).is_file() and (path / name).stat().st_size == d.nbytes for name, d in files)


def sign(manifest: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(manifest, sort_keys=True)
    return {"manifest": manifest, "sha256": sha256(text.encode()).hexdigest()}


@contextmanager
def _pointer_to(final: Path) -> Iterator[Path]:
    """A file on disk that names ``final``, to be renamed ``latest``; removed where it was not."""
    temporary = final.parent / f".{LATEST_NAME}"
    try:
        with synced_file(temporary) as file:
            file.write(f"{final.name}\n".encode())
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _make(root: Path) -> None:
    """Make a folder and those above it, each on disk before something stands in it."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        flush_folder(path.parent)
    root.mkdir(exist_ok=True)


def _hidden(root: Path, stage: str, name: str) -> Path:
    return root / f".{stage}-{socket.gethostname()}-{os.getpid()}-{name}"


def _remove_leftovers(root: Path) -> None:
    """Remove folders of dead processes of this machine, and of this process."""
    for path in list(root.iterdir()):
        name = _SAVING.fullmatch(path.name)
        if name and name["host"] == socket.gethostname():
            pid = int(name["pid"])
            if pid == os.getpid() or not psutil.pid_exists(pid):
                shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else -1
