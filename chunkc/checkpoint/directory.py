"""A directory of checkpoints: each appears whole or not at all, is checked before it is used, and old ones go.

    latest                   name of the newest complete checkpoint, replaced in one piece when that one is there
    00000003-step-150/       the third checkpoint saved here, after 150 steps
        manifest.json        format, versions, and size and SHA-256 of every other file
        ...
    .saving-...              under way, or left by a process that was killed; the next save removes it

A checkpoint is written into a folder of its own; files and folder are flushed to disk (fsync), the folder is renamed,
the directory flushed, and only then ``latest`` changes. So at whatever moment the process or the machine stops, what
``latest`` names is whole. Numbers only rise, so that the order of saving is the order of names, also when a run went
back to an older step.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from chunkc.checkpoint.storage import FileDigest, digest_of, write_json
from chunkc.errors import CheckpointError
from chunkc.runtime.ranks import Ranks
from chunkc.runtime.together import exchange

logger = logging.getLogger("chunkc")

FORMAT: Final = 1
MANIFEST_NAME: Final = "manifest.json"
LATEST_NAME: Final = "latest"
_NAME: Final = re.compile(r"(\d{8,})-step-(\d+)")
_SAVING: Final = re.compile(r"\.(?:saving|removing)-(?P<host>.*)-(?P<pid>\d+)-[^-]*-step-\d+")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        format: number of the format; a reader refuses those above its own.
        step: optimizer steps taken.
        versions: of chunkc and torch, by name, when it was saved.
        files: what every other file must be, by name.
    """

    format: int
    step: int
    versions: Mapping[str, str]
    files: Mapping[str, FileDigest]


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints in ``root``, in the order of saving: those whose files all have their sizes."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return [path for path in sorted(found, key=_number) if _is_complete(path)]


def newest(root: Path) -> Path | None:
    """The checkpoint that ``latest`` names, whole or not; else the newest complete one; None without any.

    Where it names none that is there, since it was damaged or the checkpoint was removed by hand, a log line says so.
    """
    found = max(checkpoints(root), key=_number, default=None)
    with suppress(FileNotFoundError, NotADirectoryError):
        name = (root / LATEST_NAME).read_text(encoding="utf-8", errors="replace").strip()
        if _NAME.fullmatch(name) and (root / name).is_dir():
            return root / name
        if found is not None:
            logger.warning(
                "%s names no checkpoint (%.80r); the newest complete one is %s", root / LATEST_NAME, name, found
            )
    return found


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a checkpoint itself, whole or not, and no directory of checkpoints."""
    return (path / MANIFEST_NAME).is_file() or (path.is_dir() and _NAME.fullmatch(path.resolve().name) is not None)


def before(path: Path) -> Path | None:
    """The newest complete checkpoint saved before ``path``."""
    return max((p for p in checkpoints(path.parent) if _number(p) < _number(path)), key=_number, default=None)


def begin(root: Path, step: int) -> Path:
    """A new folder to write a checkpoint into; what killed saves have left is removed."""
    _make(root)
    _remove_leftovers(root)
    taken = [_number(path) for path in root.iterdir() if _NAME.fullmatch(path.name)]
    path = _hidden(root, "saving", f"{max(taken, default=0) + 1:08d}-step-{step}")
    path.mkdir()
    return path


def commit(path: Path, manifest: Manifest) -> Path:
    """The folder of ``begin``, whose files are all on disk, becomes the newest checkpoint; its final path."""
    write_json(path / MANIFEST_NAME, _signed(asdict(manifest)))
    _flush(path)
    final = path.parent / "-".join(path.name.rsplit("-", 3)[1:])
    path.rename(final)
    _flush(path.parent)
    _point_to(final)
    return final


def give_up(path: Path) -> None:
    """Remove the folder of ``begin``."""
    shutil.rmtree(path, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Remove all complete checkpoints but the last ``keep``."""
    for path in checkpoints(root)[:-keep]:
        hidden = _hidden(root, "removing", path.name)
        try:
            path.rename(hidden)  # first, so that a checkpoint that is half removed is none
        except OSError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)
        shutil.rmtree(hidden, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: when there is no checkpoint, the manifest is damaged or of a later format.
    """
    found, fault = _parse_manifest(path)
    if found is None:
        raise damaged(path, {MANIFEST_NAME: fault})
    if found.format > FORMAT:
        raise CheckpointError(
            f"{path} has format {found.format}, and this chunkc ({found.versions['chunkc']} saved it) reads up to "
            f"{FORMAT}: load it with that version or a later one",
            path=path,
        )
    return found


def _parse_manifest(path: Path) -> tuple[Manifest | None, str]:
    """The manifest of any format, or what is wrong with it."""
    try:
        found = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
        body, signature = found["manifest"], found["sha256"]
        if _signed(body)["sha256"] != signature:
            return None, "changed since it was written"
        files = {name: FileDigest(**digest) for name, digest in body["files"].items()}
        return Manifest(body["format"], body["step"], body["versions"], files), ""
    except FileNotFoundError:
        return None, "missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"not readable ({type(error).__name__})"


def verify(path: Path, ranks: Ranks | None = None) -> Manifest:
    """Read every file of a checkpoint and compare it with its manifest, which is returned; each rank reads its share.

    Raises:
        CheckpointError: naming the files that differ and the checkpoint before; on all ranks.
    """
    ranks = ranks or Ranks()
    [manifest, *_] = exchange(ranks, lambda: read_manifest(path))
    own = list(manifest.files.items())[ranks.rank :: ranks.size]
    found = exchange(ranks, lambda: {name: fault for name, d in own if (fault := _fault(path / name, d))})
    faults = {name: fault for part in found for name, fault in part.items()}
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
    nbytes = path.stat().st_size
    if nbytes != wanted.nbytes:
        return f"{nbytes} bytes long instead of {wanted.nbytes}"
    return None if digest_of(path) == wanted else "changed since it was written (its checksum differs)"


def _is_complete(path: Path) -> bool:
    manifest, _ = _parse_manifest(path)
    if manifest is None:
        return False
    files = manifest.files.items()
    return all((path / name).is_file() and (path / name).stat().st_size == d.nbytes for name, d in files)


def _signed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(manifest, sort_keys=True)
    return {"manifest": manifest, "sha256": sha256(text.encode()).hexdigest()}


def _point_to(final: Path) -> None:
    """``latest`` names ``final``, in one piece."""
    temporary = final.parent / f".{LATEST_NAME}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(final.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(final.parent / LATEST_NAME)
    _flush(final.parent)


def _flush(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(root: Path) -> None:
    """Make a folder and those above it, each on disk before something stands in it."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _flush(path.parent)
    root.mkdir(exist_ok=True)


def _hidden(root: Path, what: str, name: str) -> Path:
    return root / f".{what}-{socket.gethostname()}-{os.getpid()}-{name}"


def _remove_leftovers(root: Path) -> None:
    """Those of this process, of one that lives no more, and of this machine only: others may be at work."""
    for path in list(root.iterdir()):
        found = _SAVING.fullmatch(path.name)
        if found and found["host"] == socket.gethostname() and not _lives_elsewhere(int(found["pid"])):
            shutil.rmtree(path, ignore_errors=True)


def _lives_elsewhere(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1
