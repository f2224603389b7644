"""Plain data become what the annotations say, or a fault with its place: nothing is converted, nothing left out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

import pytest

from chunkc.files import Decoder, FormatError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...]
    span: tuple[int, str]
    colour: Colour
    side: Literal["left", "right"]
    is_open: bool
    centre: Point | None
    notes: Mapping[str, int]
    rest: Any
    number: complex

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a shape has points")


SHAPE = Shape(
    "s", (Point(1, 2.5), Point(2, 3.0)), (4, "m"), Colour.BLUE, "left", True, Point(0, 0.0), {"a": 1}, [3], 2j
)
DECODER = Decoder({complex: complex})


def plain() -> dict[str, Any]:
    data = asdict(SHAPE)
    return data | {"points": list(data["points"]), "span": [4, "m"], "colour": "blue", "number": "2j"}


def test_what_was_encoded_comes_back() -> None:
    assert DECODER.decode(Shape, plain()) == SHAPE
    assert DECODER.decode(Shape, plain() | {"centre": None}).centre is None
    assert type(DECODER.decode(Point, {"x": 1, "y": 2}).y) is float


FAULTS: list[tuple[str, Any, str]] = [
    ("name", 3, "name: must be a text, found 3"),
    ("name", "\ud800", "name: character 0 is half of a character"),
    ("points", {}, "points: must be a list, found {}"),
    ("points", [], "a shape has points"),
    ("points", [{"x": 1, "y": 2}, {"x": True, "y": 2}],
     "points[1].x: must be a whole number from 0 to 2**63 - 1, found True"),
    ("points", [{"x": 2**63, "y": 2}],
     "points[0].x: must be a whole number from 0 to 2**63 - 1, found 9223372036854775808"),
    ("points", [{"x": 1.0, "y": 2}], "points[0].x: must be a whole number"),
    ("points", [{"x": -1, "y": 2}], "points[0].x: must be a whole number from 0 to 2**63 - 1, found -1"),
    ("points", [{"x": 1, "y": float("inf")}], "points[0].y: must be a finite number, found inf"),
    ("points", [{"x": 1, "y": 10**400}], "points[0].y: must be a finite number, found 1000"),
    ("points", [{"x": 1, "y": "2"}], "points[0].y: must be a finite number, found '2'"),
    ("points", [{"x": 1, "y": False}], "points[0].y: must be a finite number, found False"),
    ("points", [{"x": 1}], "points[0]: fields missing or unknown: y"),
    ("points", [{"x": 1, "y": 2, "z\n": 3}], r"points[0]: fields missing or unknown: 'z\n'"),
    ("points", [[1, 2]], "points[0]: must be an object, found [1, 2]"),
    ("span", [4], "span: must have 2 entries, found [4]"),
    ("span", [4, 5], "span[1]: must be a text, found 5"),
    ("span", 4, "span: must be a list, found 4"),
    ("colour", "green", "colour: must be one of red, blue, found 'green'"),
    ("colour", ["red"], "colour: must be one of red, blue, found ['red']"),
    ("side", "up", "side: must be one of left, right, found 'up'"),
    ("is_open", 1, "is_open: must be true or false, found 1"),
    ("centre", {"x": 0, "y": None}, "centre.y: must be a finite number, found None"),
    ("notes", {"a": "1"}, "notes.a: must be a whole number"),
    ("notes", {"a b": "1"}, "notes.'a b': must be a whole number"),
    ("notes", [1], "notes: must be an object, found [1]"),
    ("number", "two", "number: complex() arg is a malformed string"),
    ("number", 2, "number: must be a text, found 2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said"), FAULTS)
def test_a_fault_has_its_place(name: str, value: Any, said: str) -> None:
    with pytest.raises(FormatError) as error:
        DECODER.decode(Shape, plain() | {name: value})
    assert str(error.value).startswith(said)
    assert len(str(error.value)) < 200


def test_what_is_found_is_shortened() -> None:
    for value in ("x" * 10**6, [["y"] * 1000] * 1000, {str(i): i for i in range(10**4)}):
        with pytest.raises(FormatError) as error:
            DECODER.decode(Point, {"x": value, "y": 1})
        assert len(str(error.value)) < 400


def test_a_type_that_documents_do_not_have_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="no values of type <class 'set'>"):
        Decoder().decode(set, [])
