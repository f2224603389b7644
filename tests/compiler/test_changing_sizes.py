"""Which calls share an entry: those of one form from the third size on, unless each size is captured alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chunkc.compiler import changing_sizes
from chunkc.compiler.changing_sizes import ChangingSizes
from chunkc.compiler.shape_cache import Signature, signature_of, tensors_of

MODEL = nn.Identity()


def of(*shapes: tuple[int, ...], flag: bool = True) -> Signature:
    return signature_of(MODEL, tuple(map(torch.ones, shapes)), {"flag": flag})


def after(*signatures: Signature) -> ChangingSizes:
    sizes = ChangingSizes()
    for signature in signatures:
        sizes.note_alone(signature)
    return sizes


def test_the_third_size_and_all_others_share_an_entry() -> None:
    first, second, third = of((4, 7)), of((4, 9)), of((4, 11))
    assert after().shared(first) is None
    assert after(first, first).shared(second) is None, "two calls of one size"
    sizes = after(first, second)
    assert sizes.shared(first) is sizes.shared(second) is None, "these have entries of their own"
    shared = sizes.shared(third)
    assert shared is not None and shared.key not in {s.key for s in (first, second, third)}
    assert shared.shapes == third.shapes, "an error names the shapes of the call"
    assert sizes.shared(of((5, 3))) is not None
    for other in (of((4, 11), flag=False), of((4, 11, 1)), of((4, 11), (4, 11))):
        assert sizes.shared(other) is None, "of another form"


def test_sizes_that_have_changed_are_added_up() -> None:
    sizes = after(of((4, 7), (4,)), of((4, 9), (4,)))
    assert sizes.changed(of((4, 7), (4,))) == {(0, 1)}, "those of the calls that were captured alone"
    assert sizes.shared(of((3, 7), (3,))) is not None
    assert sizes.changed(of((4, 7), (4,))) == {(0, 0), (0, 1), (1, 0)}


def test_calls_that_differ_in_strides_alone_have_entries_of_their_own() -> None:
    plain, strided = of((4, 7)), signature_of(MODEL, (torch.ones(4, 9)[:, :7],), {"flag": True})
    turned = signature_of(MODEL, (torch.ones(7, 4).T,), {"flag": True})
    assert len({plain.key, strided.key, turned.key}) == 3
    sizes = after(plain, strided)
    assert sizes.shared(turned) is None, "no size has changed"
    assert sizes.shared(of((4, 8))) is not None
    assert sizes.shared(turned) is not None


def test_sizes_of_one_tell_nothing_of_others() -> None:
    sizes = after(of((1, 7)), of((1, 9)))
    for shape, is_special in (((1, 8), False), ((2, 8), False), ((1, 8), True), ((2, 1), True), ((2, 0), True)):
        assert sizes.shared(of(shape)) is not None
        assert sizes.is_special(of(shape)) is is_special, shape


def test_each_size_of_a_refused_form_has_its_own_entry_but_for_those_that_are_captured() -> None:
    sizes = after(of((7,)), of((8,)))
    sizes.note_served(of((9,)))
    sizes.refuse(of((10,)))
    assert [sizes.shared(of((n,))) is not None for n in (7, 8, 9, 10, 11)] == [False, False, True, False, False]


def test_forms_are_remembered_that_were_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing_sizes, "MAX_FORMS", 2)
    sizes = after(of((7,)), of((8,)), of((7, 7)), of((8, 8)))
    assert sizes.shared(of((9,))) is not None, "used after the other"
    sizes.note_alone(of((7, 7, 7)))
    assert sizes.shared(of((9,))) is not None
    assert sizes.shared(of((9, 9))) is None, "forgotten, and begun again"


def test_tensors_are_those_of_the_shapes() -> None:
    x, y, z = torch.ones(2), torch.ones(3, 1), torch.ones(4)
    args, kwargs = ({"a": [x, 1], "b": (z,)},), {"y": y}
    assert signature_of(MODEL, args, kwargs).shapes == ((2,), (4,), (3, 1))
    assert all(a is b for a, b in zip(tensors_of(args, kwargs), (x, z, y), strict=True))
