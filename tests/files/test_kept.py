"""Documents kept between runs: found again, and never needed."""

from pathlib import Path

import pytest

from chunkc.files import KeptDocuments


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHUNKC_CACHE", raising=False)


def test_a_document_is_found_under_its_key(tmp_path: Path) -> None:
    kept = KeptDocuments(tmp_path / "a" / "b")
    assert kept.find("key") is None
    kept.keep("key", {"value": [1, 2.5, None]})
    assert KeptDocuments(tmp_path / "a" / "b").find("key") == {"value": [1, 2.5, None]}
    assert kept.find("other") is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"a": 1, "a": 2}', b" " * 100_000])
def test_a_file_that_holds_no_document_is_passed_over(content: bytes, tmp_path: Path) -> None:
    kept = KeptDocuments(tmp_path)
    kept.keep("key", 1)
    (tmp_path / "key.json").write_bytes(content)
    assert kept.find("key") is None
    kept.keep("key", 2)
    assert kept.find("key") == 2


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptDocuments(tmp_path / "file" / "below")
    kept.keep("key", 1)
    assert kept.find("key") is None


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptDocuments(tmp_path)
    kept.keep("key", 1)
    monkeypatch.setenv("CHUNKC_CACHE", "0")
    kept.keep("other", 1)
    assert kept.find("key") is None
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]
