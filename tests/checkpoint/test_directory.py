"""A directory of checkpoints after every kind of end: what is named is whole, damage is named, old ones go."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkc import CheckpointError
from chunkc.checkpoint import directory as folders
from chunkc.checkpoint.directory import Manifest
from chunkc.checkpoint.storage import write_json
from chunkc.distributed.stages import StagePlace, named_stage

VERSIONS = {"chunkc": "9.9", "torch": "2.13"}


FIRST, SECOND = StagePlace(1, 2, 1), StagePlace(2, 2, 1)


def add(root: Path, step: int, stage: StagePlace | None = None) -> Path:
    return commit(folders.begin(root, step, stage), step, stage)


def commit(path: Path, step: int, stage: StagePlace | None = None) -> Path:
    files = {name: write_json(path / name, [name, step] * 50) for name in ("a.json", "b.json")}
    return folders.commit(path, Manifest(folders.FORMAT, step, VERSIONS, files, stage))


def test_the_newest_is_the_one_saved_last_also_after_going_back(tmp_path: Path) -> None:
    assert folders.newest(tmp_path / "nowhere") is None and folders.newest(tmp_path) is None
    paths = [add(tmp_path, step) for step in (50, 100, 60, 60)]
    assert [p.name for p in paths] == [f"0000000{i}-step-{s}" for i, s in ((1, 50), (2, 100), (3, 60), (4, 60))]
    assert folders.checkpoints(tmp_path) == paths and folders.newest(tmp_path) == paths[-1]
    assert folders.before(paths[-1]) == paths[2] and folders.before(paths[0]) is None
    assert folders.verify(paths[1]).step == 100


def test_what_is_not_committed_is_not_there(tmp_path: Path) -> None:
    first = add(tmp_path, 1)
    under_way = folders.begin(tmp_path, 2)
    write_json(under_way / "a.json", [])
    assert folders.checkpoints(tmp_path) == [first] and folders.newest(tmp_path) == first
    shutil.rmtree(under_way)
    assert not under_way.exists()


def test_a_kill_between_renaming_and_pointing_leaves_the_one_before(tmp_path: Path) -> None:
    first, second = add(tmp_path, 1), add(tmp_path, 2)
    (tmp_path / folders.LATEST_NAME).write_text(first.name)
    assert folders.newest(tmp_path) == first and folders.checkpoints(tmp_path) == [first, second]
    (tmp_path / folders.LATEST_NAME).unlink()
    assert folders.newest(tmp_path) == second, "without a pointer, the newest that is complete"
    assert add(tmp_path, 3).name.startswith("00000003"), "numbers go on"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("a.json", cut, r"a\.json is \d+ bytes long instead of \d+"),
        ("b.json", flip, r"b\.json is changed since it was written \(its checksum differs\)"),
        ("b.json", Path.unlink, r"b\.json is missing"),
        ("manifest.json", cut, r"manifest\.json is not readable"),
        ("manifest.json", Path.unlink, r"manifest\.json is missing"),
    ],
)
def test_damage_is_named_and_the_complete_one_before_is_offered(
    tmp_path: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    add(tmp_path, 1)
    second, third = add(tmp_path, 2), add(tmp_path, 3)
    damage(third / name)
    with pytest.raises(CheckpointError, match=said) as error:
        folders.verify(third)
    assert error.value.damaged == (name,) and error.value.path == third
    assert error.value.previous == second and str(second) in str(error.value)
    shutil.rmtree(second)
    (tmp_path / "00000001-step-1" / "a.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint was saved before it"):
        folders.verify(third)


def test_a_manifest_that_was_edited_is_damaged_and_a_later_format_is_refused(tmp_path: Path) -> None:
    path = add(tmp_path, 1)
    found = json.loads((path / "manifest.json").read_text())
    found["manifest"]["step"] = 2
    (path / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=r"manifest\.json is changed since it was written"):
        folders.read_manifest(path)
    later = folders.begin(tmp_path, 1)
    later = folders.commit(later, Manifest(folders.FORMAT + 1, 1, VERSIONS, {}))
    with pytest.raises(CheckpointError, match=r"has format 3, and this chunkc \(9\.9 saved it\) reads up to 2"):
        folders.verify(later)


def test_a_pointer_that_is_damaged_leads_to_the_newest_complete_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the checkpoint was removed by hand; a log line says so. One that is there and damaged is named."""
    first, second = add(tmp_path, 1), add(tmp_path, 2)
    pointer = tmp_path / folders.LATEST_NAME
    data = pointer.read_bytes()
    for place in range(len(data) - 1):
        for bit in (0, 3, 7):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            pointer.write_bytes(changed)
            caplog.clear()
            assert folders.newest(tmp_path) == second
            assert [record.levelname for record in caplog.records] == ["WARNING"]
    pointer.write_bytes(data)
    cut(second / "a.json")
    assert folders.newest(tmp_path) == second
    shutil.rmtree(second)
    assert folders.newest(tmp_path) == first


def test_folders_above_are_made(tmp_path: Path) -> None:
    assert add(tmp_path / "new" / "runs" / "first", 1).is_dir()


def test_old_ones_go_and_the_newest_complete_never(tmp_path: Path) -> None:
    paths = [add(tmp_path, step) for step in range(5)]
    cut(paths[4] / "a.json")
    folders.prune(tmp_path, 2)
    assert folders.checkpoints(tmp_path) == paths[2:4], "a damaged one does not count"
    folders.prune(tmp_path, 1)
    assert folders.checkpoints(tmp_path) == paths[3:4]
    assert not list(tmp_path.glob(".removing*"))


def test_what_killed_saves_left_goes_and_what_others_do_stays(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    host = os.uname().nodename
    left = tmp_path / f".saving-{host}-{int(dead.stdout)}-00000001-step-5"
    half_removed = tmp_path / f".removing-{host}-{os.getpid()}-00000001-step-5"
    at_work = tmp_path / f".saving-{host}-{os.getppid()}-00000001-step-5"
    elsewhere = tmp_path / f".saving-other-host-{int(dead.stdout)}-00000001-step-5"
    for path in (left, half_removed, at_work, elsewhere):
        path.mkdir()
    add(tmp_path, 1)
    assert not left.exists() and not half_removed.exists()
    assert at_work.exists() and elsewhere.exists()


def test_a_folder_in_place_of_the_pointer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    first = add(tmp_path, 1)
    pointer = tmp_path / folders.LATEST_NAME
    pointer.unlink()
    pointer.mkdir()
    with pytest.raises(CheckpointError, match="latest is a folder, where a file is to name the newest checkpoint"):
        folders.begin(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [first.name, "latest"]
    assert folders.newest(tmp_path) == first, "and it is found without one"


def make_loop(pointer: Path) -> None:
    pointer.symlink_to(pointer)


def make_pipe(pointer: Path) -> None:
    os.mkfifo(pointer)


def make_endless(pointer: Path) -> None:
    pointer.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_loop, make_pipe, make_endless, Path.mkdir])
def test_a_pointer_that_is_no_file_leads_to_the_newest_complete_one(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = add(tmp_path, 1), add(tmp_path, 2)
    pointer = tmp_path / folders.LATEST_NAME
    pointer.unlink()
    make(pointer)
    assert folders.newest(tmp_path) == second
    assert "latest names no checkpoint" in caplog.text
    if make is not Path.mkdir:
        third = add(tmp_path, 3)
        assert folders.newest(tmp_path) == third and pointer.is_file() and not pointer.is_symlink()
    assert folders.before(second) == first


def test_a_checkpoint_that_cannot_be_named_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = add(tmp_path, 1)

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, os.strerror(28))

    path = folders.begin(tmp_path, 2)
    files = {"a.json": write_json(path / "a.json", [])}
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        folders.commit(path, Manifest(folders.FORMAT, 2, VERSIONS, files))
    monkeypatch.undo()
    assert path.is_dir() and folders.checkpoints(tmp_path) == [first] and folders.newest(tmp_path) == first
    shutil.rmtree(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [first.name, "latest"]
    assert add(tmp_path, 2).name == "00000002-step-2"


def test_a_renamed_folder_is_named_and_not_taken_for_the_newest(tmp_path: Path) -> None:
    first, second = add(tmp_path, 1), add(tmp_path, 2)
    renamed = second.rename(tmp_path / "00000009-step-7")
    best = add(tmp_path, 3).rename(tmp_path / "best")
    assert folders.checkpoints(tmp_path) == [first] and folders.newest(tmp_path) == first
    assert folders.misnamed(tmp_path) == [renamed, best]
    with pytest.raises(CheckpointError, match="was renamed: its manifest says that it is of step 2"):
        folders.verify(renamed)
    assert folders.verify(best).step == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 10**5, "nested more than 64 deep"),
        ('{"manifest": {}, "manifest": {}}', "the key 'manifest' stands twice"),
        ("[]", "must be an object, found"),
        ('{"manifest": {"format": 1}, "sha256": 3}', "sha256: must be a text, found 3"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = add(tmp_path, 1)
    (path / folders.MANIFEST_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=rf"manifest\.json is not readable \(.*{said}"):
        folders.verify(path)


def test_a_manifest_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    path = add(tmp_path, 1)
    (path / folders.MANIFEST_NAME).unlink()
    (path / folders.MANIFEST_NAME).mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json is not readable \(Is a directory\)"):
        folders.verify(path)


@pytest.mark.parametrize("other", [SECOND, StagePlace(1, 3, 1), StagePlace(1, 2, 2), None])
def test_a_directory_is_of_one_stage(other: StagePlace | None, tmp_path: Path) -> None:
    """Nothing is written where another's checkpoint is, whichever of the two began."""
    for mine, theirs in ((FIRST, other), (other, FIRST)):
        root = tmp_path / str(mine)
        saved = [add(root, 1, mine), add(root, 2, mine)]
        assert folders.read_manifest(saved[0]).stage == mine
        before = sorted(root.rglob("*"))
        with pytest.raises(CheckpointError) as refused:
            folders.begin(root, 3, theirs)
        assert f"is of {named_stage(mine)}, and {named_stage(theirs)} was to be saved" in str(refused.value)
        assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("step", [1, 2])
def test_stages_that_begin_a_directory_at_a_time_do_not_mix(step: int, tmp_path: Path) -> None:
    """Each began before the other had ended, with the same number; the second to end is refused."""
    under_way = folders.begin(tmp_path, step, SECOND)
    elsewhere = under_way.rename(tmp_path / under_way.name.replace(str(os.getpid()), "1"))  # of a process that runs
    saved = add(tmp_path, 1, FIRST)
    with pytest.raises(CheckpointError, match=r"was saved meanwhile by another|is of stage 1 of 2 of a pipeline"):
        commit(elsewhere, step, SECOND)
    assert folders.checkpoints(tmp_path) == [saved] and folders.newest(tmp_path) == saved
    assert elsewhere.is_dir()


def test_a_manifest_without_a_stage_is_of_a_whole_model(tmp_path: Path) -> None:
    """As those of format 1 are, which say nothing of stages."""
    path = folders.begin(tmp_path, 1)
    saved = folders.commit(path, Manifest(folders.WHOLE_FORMAT, 1, VERSIONS, {}))
    assert json.loads((saved / "manifest.json").read_text())["manifest"].keys() == {
        "format",
        "step",
        "versions",
        "files",
    }
    assert folders.read_manifest(saved).stage is None
