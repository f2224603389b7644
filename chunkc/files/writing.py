"""Write a file whole or not at all, however the disk or the process fails meanwhile.

The data go to a temporary file in the same folder, are flushed to disk (fsync), and the temporary file takes the name.
Pipes, devices and descriptors of this process (``/dev/stdout``, even redirected to a file) are written to directly:
they have no content to keep, or others write to them as well.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from chunkc.errors import ChunkcError

_MAX_LINKS: Final = 40
"""From a name to a file, as Linux counts them."""


def save_text(path: str | os.PathLike[str], text: str) -> None:
    save_bytes(path, text.encode("utf-8"))


def save_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Make ``data`` the content of a file that a user named.

    Raises:
        ChunkcError: it cannot be written; what the file held, it holds.
    """
    try:
        replace_file(Path(path), data)
    except OSError as error:
        raise ChunkcError(
            f"cannot write {os.fspath(path)}: {error.strerror or error}. Nothing has changed there; give another place"
        ) from error


def replace_file(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path``, in one piece, with the permissions that it had.

    Raises:
        OSError: it cannot be written; what the file held, it holds.
    """
    descriptor, before = _own_descriptor(path), _mode(path)
    if descriptor is not None:
        with os.fdopen(os.dup(descriptor), "wb") as file:  # behind what was written there, also to a regular file
            file.write(data)
        return
    if before is not None and not stat.S_ISREG(before) and not stat.S_ISDIR(before):
        with path.open("wb") as file:
            file.write(data)
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with synced_file(temporary, exclusive=True) as file:
            if before is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(before))
            file.write(data)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    flush_folder(target.parent)


@contextmanager
def synced_file(path: Path, *, exclusive: bool = False) -> Iterator[BinaryIO]:
    """``path``, opened for writing (``exclusive``: it must not exist), and on disk when the block ends."""
    with path.open("xb" if exclusive else "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_descriptor(path: Path) -> int | None:
    """The descriptor of this process that ``path`` names, as ``/dev/stdout`` names 1; else None."""
    folders = (Path("/dev/fd"), Path("/proc/self/fd"), Path(f"/proc/{os.getpid()}/fd"))
    for _ in range(_MAX_LINKS):
        if path.parent in folders and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
