"""A file is written whole or not at all: whatever fails, the name has what it had, and nothing lies beside it."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from chunkc.errors import ChunkcError
from chunkc.files import replace_file, save_text, writing


def test_new_and_old_files_take_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    save_text(path, "one")
    path.chmod(0o640)
    save_text(str(path), "zwei ü")
    assert path.read_text(encoding="utf-8") == "zwei ü"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    save_text(tmp_path / "a", "")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("there", "not_yet"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere" / name)
    (tmp_path / "elsewhere" / "there").write_text("old")
    for name in ("there", "not_yet"):
        save_text(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink() and (tmp_path / "elsewhere" / name).read_text() == "new"


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save_text(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    save_text("/dev/null", "away")
    assert Path("/dev/null").is_char_device()


def full(file: BinaryIO, data: bytes) -> None:
    os.write(file.fileno(), data[: len(data) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        full(self._file, data)

    def fileno(self) -> int:
        return self._file.fileno()


Break = Callable[[pytest.MonkeyPatch], None]


def break_write(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = writing.synced_file

    @writing.contextmanager
    def on_a_full_disk(path: Path, *, exclusive: bool = False):  # type: ignore[no-untyped-def]
        with opened(path, exclusive=exclusive) as file:
            yield FullDisk(file)

    monkeypatch.setattr(writing, "synced_file", on_a_full_disk)


def break_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)


def break_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "replace", refuse)


def test_standard_output_in_a_file_keeps_what_others_write_there(tmp_path: Path) -> None:
    program = """
from chunkc.files import save_text
print("before", flush=True)
for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
    save_text(name, "saved\\n")
print("after")
"""
    printed = tmp_path / "printed.txt"
    with printed.open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True, timeout=300)
    assert printed.read_text() == "before\n" + 3 * "saved\n" + "after\n"


def test_a_name_may_be_as_long_as_the_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("\N{CJK UNIFIED IDEOGRAPH-8BA1}" * 84)
    save_text(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize(
    ("broken", "said"), [(break_write, "No space"), (break_sync, "Input/output"), (break_rename, "Read-only")]
)
@pytest.mark.parametrize("before", ("old", None))
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Break, said: str, before: str | None
) -> None:
    path = tmp_path / "a.txt"
    if before is not None:
        path.write_text(before)
    broken(monkeypatch)
    with pytest.raises(ChunkcError, match=f"cannot write {path}: {said}.* Nothing has changed there"):
        save_text(path, "new" * 1000)
    monkeypatch.undo()
    assert (path.read_text() if path.exists() else None) == before
    assert list(tmp_path.iterdir()) == ([path] if before is not None else [])


def test_an_interrupt_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def make_folder(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(("make", "said"), [(make_folder, "Is a directory"), (make_loop, "Too many levels")])
def test_a_folder_and_a_loop_of_links_are_refused(tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    make(tmp_path / "a")
    with pytest.raises(ChunkcError, match=said):
        save_text(tmp_path / "a", "text")
    with pytest.raises(OSError, match=said):
        replace_file(tmp_path / "a", b"")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("path", ("/dev/full", "/proc/nothing/here", "/proc/a.txt"))
def test_places_that_take_nothing_are_refused(path: str) -> None:
    with pytest.raises(ChunkcError, match=f"cannot write {path}"):
        save_text(path, "text")
