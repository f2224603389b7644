"""Seeded mutations of documents, and a check that whatever reads them ends in an error of ours or in a right result.

Half of the mutations change the structure of JSON, half the bytes; each is made from a seed of its own.
"""

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from chunkc.errors import ChunkcError

NUM_SHORT, NUM_SOAK = 100, 5000
ALLOWANCE_NBYTES = 2**30
LIMIT_S = 20.0
_PLACEHOLDER = "@@deep@@"
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53, 2**63 - 1, 2**63, 10**9, 10**18, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "0",
        "x",
        "c0",
        "os0",
        "d0",
        "-1",
        "\x00",
        "\x1b[31m",
        "\ud800",
        "ü" * 99,
        "../../etc/passwd",
        "/dev/zero",
    ),
    *([], {}, [[]], [0], [None], {"": None}, {"x": {}}, ["x"] * 9),
)
Place = tuple[Any, Any]
"""A container and the key or position in it."""


def num_mutations(config: pytest.Config) -> int:
    return NUM_SOAK if config.getoption("--soak") else NUM_SHORT


def mutated(data: bytes, seed: int) -> bytes:
    """One to three mutations of a document of JSON, or of anything else by its bytes alone."""
    random = Random(seed)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        changed = None
        if random.random() < 0.6:
            changed = _restructured(data, random)
        data = _rewritten(data, random) if changed is None else changed
    return data


def _restructured(data: bytes, random: Random) -> bytes | None:
    try:
        root = [json.loads(data)]
    except (ValueError, RecursionError):
        return None
    places = list(_places(root))
    container, key = random.choice(places)
    kind = random.choice(("drop", "repeat", "odd", "odd", "near", "near", "swap", "deep", "twice", "empty"))
    value = container[key]
    if kind == "drop" and container is not root:
        del container[key]
    elif kind == "repeat":
        _repeat(container, key, random)
    elif kind == "near":
        container[key] = _near(value, random)
    elif kind == "swap":
        other, place = random.choice(places)
        container[key], other[place] = other[place], value
    elif kind == "deep":
        container[key] = _PLACEHOLDER
    elif kind == "twice" and isinstance(value, dict) and value:
        text = json.dumps(value)
        return _dumped(root, container, key, "{" + text[1:-1] + ", " + text[1:])
    elif kind == "empty" and isinstance(value, (dict, list, str)):
        container[key] = type(value)()
    else:
        container[key] = random.choice(_ODD)
    if kind == "deep":
        depth = random.choice((3, 70, 500, 100_000))
        return _dumped(
            root, container, key, random.choice(("[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth))
        )
    try:
        return json.dumps(root[0]).encode()
    except (ValueError, RecursionError):  # a swap put a container into itself
        return None


def _dumped(root: list[Any], container: Any, key: Any, text: str) -> bytes | None:
    container[key] = _PLACEHOLDER
    try:
        return json.dumps(root[0]).replace(json.dumps(_PLACEHOLDER), text, 1).encode()
    except (ValueError, RecursionError):
        return None


def _places(root: list[Any]) -> Iterator[Place]:
    todo: list[Any] = [root]
    while todo:
        container = todo.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            yield container, key
            if isinstance(container[key], (dict, list)):
                todo.append(container[key])


def _repeat(container: Any, key: Any, random: Random) -> None:
    if isinstance(container, dict):
        container[f"{key}{random.choice(('', ' ', '2'))}"] = container[key]
    else:
        container[key:key] = [container[key]] * random.choice((1, 2, 50))


def _near(value: Any, random: Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return random.choice(
            (value + 1, value - 1, -value, value * 2, value // 2, value * 10**6, str(value), float(value))
        )
    if isinstance(value, list):
        return random.choice((value[::-1], value[1:], value[:-1], value * 2, dict.fromkeys(map(str, value))))
    if isinstance(value, dict):
        return random.choice((list(value), list(value.values()), dict(reversed(value.items()))))
    digits = [i for i, c in enumerate(value) if c.isdigit()]
    if digits and random.random() < 0.8:
        at = random.choice(digits)
        return value[:at] + random.choice(("0", "1", "9", "99", "9" * 5000, "-1", "٣", "")) + value[at + 1 :]
    return random.choice((value + "x", value[:-1], value.upper(), value[::-1], value * 100))


def _rewritten(data: bytes, random: Random) -> bytes:
    at, other = random.randrange(len(data) + 1), random.randrange(len(data) + 1)
    kind = random.choice(("cut", "flip", "flip", "splice", "insert", "remove"))
    length = random.choice((1, 2, 10, 100))
    if kind == "cut":
        return data[:at]
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if kind == "splice":
        return data[:at] + data[other : other + length] + data[at:]
    if kind == "insert":
        return data[:at] + random.randbytes(length) + data[at:]
    return data[:at] + data[at + length :]


def check_mutations(
    data: bytes, path: Path, read: Callable[[Path], object], seeds: range, ours: type[ChunkcError]
) -> tuple[int, int]:
    """Write mutations of ``data`` to ``path`` and ``read`` each: it returns, or raises ``ours`` with the file's name.

    Time and memory are bounded. Returns how many were refused, and how many were read.
    """
    refused = read_through = 0
    with bounded_memory(ALLOWANCE_NBYTES):
        for seed in seeds:
            changed = mutated(data, seed)
            path.write_bytes(changed)
            start_s = time.process_time()
            try:
                read(path)
                read_through += 1
            except ours as error:
                refused += 1
                assert path.name in str(error), f"seed {seed}: the error does not name the file: {error}"
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error!s:.500}") from error
            elapsed_s = time.process_time() - start_s
            assert elapsed_s < LIMIT_S, f"seed {seed} took {elapsed_s:.1f} s"
    return refused, read_through


@contextmanager
def bounded_memory(allowance_nbytes: int) -> Iterator[None]:
    """At most so many bytes of address space more than now; whoever asks for more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + allowance_nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
