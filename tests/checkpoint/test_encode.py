"""Values as JSON and tensors: what comes back is what was given, and nothing else is taken."""

import json
import math
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc import ChunkcError
from chunkc.checkpoint.encode import Encoder, decode
from chunkc.files import FormatError


def through_json(value: Any) -> Any:
    encoder = Encoder("object")
    text = json.dumps(encoder.encode(value, "extra"))
    return decode(json.loads(text), encoder.tensors)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5)
)
keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.booleans()), st.just("#"))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types_of(k), types_of(v)) for k, v in value.items()]
    return (type(value), [types_of(v) for v in value]) if isinstance(value, (list, tuple)) else type(value)


@pytest.mark.long
@given(values)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    found = through_json(value)
    assert found == value and types_of(found) == types_of(value)


@pytest.mark.parametrize("number", [math.inf, -math.inf, 5e-324, 0.1, 1e300])
def test_numbers_are_exact(number: float) -> None:
    assert through_json(number) == number and math.isnan(through_json([math.nan])[0])


def test_generators_and_tensors_come_back() -> None:
    state = random.getstate()
    assert through_json(state) == state
    name, keys, *rest = np.random.get_state()
    found_name, found_keys, *found_rest = through_json(np.random.get_state())
    assert (found_name, found_rest) == (name, rest)
    assert found_keys.dtype == keys.dtype and (found_keys == keys).all()
    weight = torch.randn(3, 4, requires_grad=True).t()
    found = through_json({"dtype": torch.bfloat16, "w": weight, "n": np.float32(0.1), "shape": weight.shape})
    assert found["dtype"] is torch.bfloat16 and torch.equal(found["w"], weight) and not found["w"].requires_grad
    assert found["n"] == np.float32(0.1) and type(found["n"]) is np.float32
    assert found["shape"] == weight.shape and type(found["shape"]) is torch.Size


def test_what_changes_later_changes_nothing() -> None:
    value = {"tensor": torch.zeros(3), "array": np.zeros(3), "list": [1]}
    encoder = Encoder("object")
    encoded = encoder.encode(value, "extra")
    value["tensor"].add_(1)
    value["array"] += 1
    value["list"].append(2)
    found = decode(encoded, encoder.tensors)
    assert not found["tensor"].any() and not found["array"].any() and found["list"] == [1]


@dataclass
class Position:
    epoch: int


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"at": [1, Position(2)]}, r"extra\['at'\]\[1\] is a .*Position"),
        ({"run": print}, r"extra\['run'\] is a builtins\.builtin_function"),
        (Text("a"), r"extra is a .*Text"),
        ({1: {2}}, r"extra\[1\] is a builtins\.set"),
        (np.array(["a"]), r"extra is a numpy\.ndarray"),
        (np.array([None]), r"extra is a numpy\.ndarray of object"),
        (np.longdouble(1), r"extra is a numpy\.longdouble of float128"),
        (torch.ones(1, dtype=torch.complex64), r"extra is a torch\.Tensor of torch\.complex64"),
        (torch.eye(2).to_sparse(), r"extra is a torch\.Tensor"),
    ],
)
def test_other_kinds_are_refused_by_their_place(value: Any, where: str) -> None:
    with pytest.raises(ChunkcError, match=where):
        Encoder("object").encode(value, "extra")


def test_what_contains_itself_or_is_too_deep_is_refused() -> None:
    extra: dict[str, Any] = {"at": [1, 2]}
    extra["at"].append(extra)
    with pytest.raises(ChunkcError, match=r"extra\['at'\]\[2\] contains itself"):
        Encoder("object").encode(extra, "extra")
    twice = [1]
    assert through_json([twice, twice]) == [[1], [1]], "the same value in two places is none that contains itself"
    deep: Any = 0
    for _ in range(63):
        deep = {(1, 2): deep}
    assert through_json(deep) == deep
    with pytest.raises(ChunkcError, match=r"is nested more than 64 deep"):
        Encoder("object").encode([[deep]], "extra")
    with pytest.raises(ChunkcError, match=r"extra\[0\] is a whole number of 20001 bits; a checkpoint holds 8192"):
        Encoder("object").encode([2**20000], "extra")


@pytest.mark.parametrize(
    ("made_up", "said"),
    [
        ({"#": "eval", "items": []}, "#: must be one of tuple, .*, found 'eval'"),
        ({"#": ["tuple"]}, "#: must be one of"),
        ({"#": "dtype", "name": "load"}, "is no dtype"),
        ([{"a": {"#": "tuple"}}], r"\[0\]\.'a': is no tuple as a checkpoint holds it \(KeyError: 'items'\)"),
        ({"#": "tuple", "items": {"a": 1}}, "items: must be a list"),
        ({"#": "dict", "items": [1]}, "is no dict"),
        ({"#": "dict", "items": [[[], 1]]}, "is no dict"),
        ({"#": "size", "items": ["a"]}, "is no size"),
        ({"#": "bytes", "base64": "?"}, "is no bytes"),
        ({"#": "tensor", "key": "object.7"}, "is no tensor"),
        ({"#": "tensor", "key": []}, "is no tensor"),
    ],
)
def test_reading_makes_nothing_else(made_up: Any, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        decode(made_up, {})
