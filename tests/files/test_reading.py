"""Documents within bounds: bytes, text, syntax, nesting and repeated keys, each refused by its rule."""

import tracemalloc
from pathlib import Path

import pytest

from chunkc.files import FormatError, read_json


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_what_json_says_is_read(tmp_path: Path) -> None:
    assert read_json(written(tmp_path, '{"a": [1, 2.5, null, true, "ü"]}'), max_nbytes=100) == {
        "a": [1, 2.5, None, True, "ü"]
    }
    assert read_json(written(tmp_path, "[" * 64 + "]" * 64), max_nbytes=128)
    assert read_json(written(tmp_path, "[" * 90 + "]" * 90), max_nbytes=200, max_depth=90)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2", "it holds no JSON: Expecting"),
        (b"[\xff]", "byte 1 is no UTF-8 text"),
        ("[" * 65 + "]" * 65, "it is nested more than 64 deep"),
        ('{"a":' * 65 + "0" + "}" * 65, "it is nested more than 64 deep"),
        ("[" * 10**6, "it is nested more than 64 deep"),
        ('[{"a": 1, "b": 2, "a": 3}]', "the key 'a' stands twice in one object"),
        ("9" * 5000, "it holds no JSON: Exceeds the limit"),
        (" " * 101, "it is larger than the 100 bytes"),
        ("", "it holds no JSON"),
    ],
)
def test_a_fault_says_the_rule(tmp_path: Path, content: str | bytes, said: str) -> None:
    most = 100 if "larger" in said else 10**7
    with pytest.raises(FormatError, match=said):
        read_json(written(tmp_path, content), max_nbytes=most)


def test_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    path = written(tmp_path, "[]")
    tracemalloc.start()
    read_json(path, max_nbytes=2**34)
    with pytest.raises(FormatError, match="larger than the 4194304 bytes"):
        read_json("/dev/zero", max_nbytes=2**22)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24
