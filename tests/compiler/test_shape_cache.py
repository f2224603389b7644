"""The table of shapes: what tells calls apart, what it holds on to, and its bound."""

import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkc import ShapeLimitError
from chunkc._torch_compat.core import fresh_code
from chunkc.compiler import shape_cache
from chunkc.compiler.shape_cache import MAX_PROGRAMS, ShapeTable, Signature, signature_of

MODEL = nn.Linear(2, 2)
Point = namedtuple("Point", "x y")


class Node:
    """An object in a cycle of its own."""

    def __init__(self) -> None:
        self.itself = self


def test_collections_are_rarer_in_a_capture_and_find_all_there_is() -> None:
    thresholds = gc.get_threshold()
    before = weakref.ref(Node())
    with shape_cache.rarer_collections():
        with shape_cache.rarer_collections():
            assert gc.get_threshold()[0] == shape_cache.NUM_YOUNG
        gc.collect()
        assert before() is None, "models that nobody holds any more leave their memory to the next plan"
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("youngest", [0, 10**6])
def test_a_user_who_collects_more_rarely_is_left_alone(youngest: int) -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(youngest)
        with shape_cache.rarer_collections():
            assert gc.get_threshold()[0] == youngest
    finally:
        gc.set_threshold(*thresholds)


class Cache:
    def __init__(self, length: int = 0) -> None:
        self.values = torch.zeros(length + 1)


def of(*args: Any, **kwargs: Any) -> Signature:
    return signature_of(MODEL, args, kwargs)


ONES = torch.ones(2, 3)
DISTINCT: dict[str, tuple[Callable[[], Signature], Callable[[], Signature]]] = {
    "shape": (lambda: of(torch.ones(2, 3)), lambda: of(torch.ones(3, 2))),
    "dtype": (lambda: of(torch.ones(2)), lambda: of(torch.ones(2).double())),
    "stride": (lambda: of(torch.ones(2, 3)), lambda: of(torch.ones(3, 2).t())),
    "requires_grad": (lambda: of(torch.ones(2)), lambda: of(torch.ones(2, requires_grad=True))),
    "inference tensor": (lambda: of(torch.ones(2)), lambda: of(_inference_tensor())),
    "the same tensor twice": (lambda: of(ONES, ONES), lambda: of(ONES, ONES.clone())),
    "position and keyword": (lambda: of(ONES), lambda: of(x=ONES)),
    "keywords": (lambda: of(x=ONES), lambda: of(y=ONES)),
    "values of numbers": (lambda: of(1), lambda: of(2)),
    "kinds of numbers": (lambda: of(1), lambda: of(True)),
    "1 and 1.0": (lambda: of(1), lambda: of(1.0)),
    "signs of zeros": (lambda: of(0.0), lambda: of(-0.0)),
    "strings": (lambda: of("a"), lambda: of("b")),
    "nothing": (lambda: of(None), lambda: of(ONES)),
    "containers": (lambda: of([ONES]), lambda: of((ONES,))),
    "nesting": (lambda: of([ONES, [ONES]]), lambda: of([[ONES], ONES])),
    "keys": (lambda: of({"a": ONES}), lambda: of({"b": ONES})),
    "contents of named tuples": (lambda: of(Point(1, 2)), lambda: of(Point(1, 3))),
    "kinds of objects": (lambda: of(Cache()), lambda: of(object())),
    "training": (lambda: of(ONES), lambda: signature_of(nn.Linear(2, 2).eval(), (ONES,), {})),
    "autocast": (lambda: of(ONES), lambda: _autocast()),
    "no_grad": (lambda: of(ONES), lambda: _no_grad()),
    "inference mode": (lambda: _no_grad(), lambda: _inference()),
}


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


def _autocast() -> Signature:
    with torch.autocast("cpu", torch.bfloat16):
        return of(ONES)


def _no_grad() -> Signature:
    with torch.no_grad():
        return of(ONES)


def _inference() -> Signature:
    with torch.inference_mode():
        return of(ONES)


@pytest.mark.parametrize("name", DISTINCT)
def test_calls_that_differ(name: str) -> None:
    first, second = DISTINCT[name]
    assert first().key == first().key and hash(first().key) == hash(first().key)
    assert first().key != second().key


def test_calls_that_do_not_differ() -> None:
    assert of(torch.ones(2, 3)).key == of(torch.zeros(2, 3)).key
    assert of(float("nan")).key == of(float("nan")).key
    assert of(Cache(1)).key == of(Cache(2)).key


def test_what_is_plain() -> None:
    plain = (ONES, 1, 2.0, "a", None, True, torch.float32, [ONES, {"a": (1, None)}], Point(ONES, 1), OrderedDict(a=1))
    assert of(*plain).is_plain
    for strange in (Cache(), [Cache()], {"a": Cache()}, object, nn.Linear(1, 1), ONES.to_sparse()):
        assert not of(strange).is_plain


def test_growing_by_one_is_the_next_call_of_a_loop() -> None:
    ids, mask = torch.ones(2, 5), torch.ones(2, 5)
    now = of(input_ids=ids, attention_mask=mask)
    assert of(input_ids=torch.ones(2, 6), attention_mask=torch.ones(2, 6)).continues(now)
    assert of(input_ids=torch.ones(2, 6), attention_mask=torch.ones(2, 5)).continues(now)
    assert not now.continues(now)
    for other in (torch.ones(2, 7), torch.ones(2, 4), torch.ones(3, 6), torch.ones(2, 6, 1), torch.ones(2, 6).int()):
        assert not of(input_ids=other, attention_mask=torch.ones(2, 6)).continues(now)


class Compiler:
    def __init__(self, max_programs: int = MAX_PROGRAMS) -> None:
        self.table = ShapeTable(self.make_run, max_programs)
        self.made: list[object] = []
        self.fails = False

    def make_run(self, *_: object) -> Callable[..., Any]:
        known: set[object] = set()

        def run(x: torch.Tensor, extra: object = None) -> torch.Size:
            key = (x.shape, getattr(extra, "values", x).shape)
            if key not in known:
                self.table.check_room()
                if self.fails:
                    raise ValueError("does not compile")
                known.add(key)
                self.made.append(key)
                self.table.captured()
            return x.shape

        return run

    def __call__(self, *args: Any) -> Any:
        return self.table.call(of(*args), args, {})


def test_one_program_per_shape_up_to_the_bound() -> None:
    compiler = Compiler(max_programs=3)
    for length in (1, 2, 3, 1, 2, 3):
        assert compiler(torch.ones(length)) == (length,)
    assert len(compiler.made) == compiler.table.num_programs == len(compiler.table) == 3
    with pytest.raises(ShapeLimitError, match=r"shapes \[4\].* 3 are made.*newest for \[1\]; \[2\]; \[3\]\).*[Pp]ad"):
        compiler(torch.ones(4))
    assert len(compiler.made) == len(compiler.table) == 3
    assert compiler(torch.ones(2)) == (2,), "what is made stays"


def test_programs_inside_an_entry_count_too() -> None:
    """The contents of an argument of a kind of its own are no part of a signature; guards see them."""
    compiler = Compiler(max_programs=3)
    for length in range(3):
        compiler(torch.ones(1), Cache(length))
    assert (len(compiler.table), compiler.table.num_programs) == (1, 3)
    with pytest.raises(ShapeLimitError):
        compiler(torch.ones(1), Cache(9))
    compiler(torch.ones(1), Cache(1))


def test_a_call_that_makes_no_program_leaves_nothing() -> None:
    compiler = Compiler(max_programs=2)
    compiler.fails = True
    for length in range(5):
        with pytest.raises(ValueError, match="does not compile"):
            compiler(torch.ones(length))
    assert (len(compiler.table), compiler.table.num_programs) == (0, 0)
    compiler.fails = False
    compiler(torch.ones(1))
    assert of(torch.ones(1)) in compiler.table
    assert of(torch.ones(2)) not in compiler.table


def test_nothing_of_a_call_is_held() -> None:
    compiler = Compiler()
    x, cache = torch.ones(3), Cache()
    held = [weakref.ref(x), weakref.ref(cache), weakref.ref(cache.values)]
    compiler(x, cache)
    del x, cache
    gc.collect()
    assert [reference() for reference in held] == [None, None, None]


def test_more_guards_fail_than_dynamo_allows_one_code_object() -> None:
    """Beyond Dynamo's recompile limit an entry goes on with a fresh code object, without any configuration."""
    num_graphs = 0
    before = torch._dynamo.config.recompile_limit

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        table.captured()
        return module.forward

    model = nn.Module()

    def make_run(*_: object) -> Callable[..., Any]:
        def enter(x: torch.Tensor) -> torch.Tensor:
            return x * model.factor

        return torch.compile(fresh_code(enter), backend=backend, fullgraph=True, dynamic=False)

    table = ShapeTable(make_run)
    x = torch.ones(2)
    for factor in range(2 * before + 3):
        model.factor = float(factor)
        assert torch.equal(table.call(of(x), (x,), {}), x * factor)
    assert num_graphs == table.num_programs == 2 * before + 3
    assert len(table) == 1
    assert torch._dynamo.config.recompile_limit == before


def test_entries_that_make_no_program_are_kept_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that run by what others have captured: their entry is not made, nor their frame traced, again."""
    monkeypatch.setattr(shape_cache, "MAX_IDLE", 2)
    num_made, numbers = 0, list[int]()

    def make_run(*_: object) -> Callable[..., Any]:
        nonlocal num_made
        num_made += 1
        return lambda x: x

    table = ShapeTable(make_run)
    for n in (1, 2, 1, 3, 1, 2):
        assert table.call(of(torch.ones(n)), (n,), {}) == n
        numbers.append(num_made)
    assert numbers == [1, 2, 2, 3, 3, 4], "3 took the place of 2"
    assert of(torch.ones(3)) not in table and of(torch.ones(1)) in table
    assert (len(table), table.num_programs) == (0, 0)


def test_further_programs_of_a_known_signature_count_by_their_share() -> None:
    table = ShapeTable(lambda *_: lambda x: table.captured(), max_programs=2, share_of_more=1 / 4)
    for _ in range(5):  # 1 + 4 / 4
        table.call(of(ONES), (1,), {})
    assert table.num_programs == 5
    with pytest.raises(ShapeLimitError, match="5 are made"):
        table.call(of(torch.ones(7)), (1,), {})
