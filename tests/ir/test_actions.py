"""Every action has a text form that parses back, and nothing else parses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkc.ir.actions import FROM_SLOT, LANDINGS, TO_SLOT, Action, Op, Stream, parse

CHUNK_OPS = (Op.FETCH, Op.OPEN, Op.EVICT, Op.DROP, Op.STASH, Op.ADD, Op.NORM, Op.BEGIN, Op.UPDATE, Op.RESTORE)
STREAMS: dict[Op, tuple[Stream, ...]] = {
    Op.FETCH: (Stream.H2D,),
    Op.OPEN: (Stream.H2D,),
    Op.LOAD: (Stream.H2D,),
    Op.EVICT: (Stream.D2H,),
    Op.STORE: (Stream.D2H,),
    Op.GATHER: (Stream.COMM,),
    Op.REDUCE: (Stream.COMM,),
    Op.SUM: (Stream.COMM,),
    Op.NORM: (Stream.COMPUTE, Stream.COMM),
    Op.BEGIN: (Stream.CPU,),
    Op.OFFLOAD: (Stream.D2H,),
    Op.RELOAD: (Stream.H2D,),
    **{op: (Stream.COMPUTE, Stream.CPU) for op in (Op.UPDATE, Op.RESTORE)},
}
numbers = st.integers(0, 10**6)
segments = st.builds(lambda graph, n: f"{graph}.{n}", st.sampled_from(("fwd", "bwd")), numbers)
labels = st.builds(lambda letter, n: f"{letter}{n}", st.sampled_from("fbst"), numbers)


@st.composite
def actions(draw: st.DrawFn, op: Op) -> Action:
    letters = {Op.LOAD: ("os",), Op.STORE: ("os",)}.get(op, ("c",))
    if op in (Op.GATHER, Op.RELEASE, Op.REDUCE):
        letters = ("g",)
    elif op in (Op.OFFLOAD, Op.DISCARD, Op.ALLOCATE, Op.RELOAD):
        letters = ("a",)
    target = draw(st.sampled_from(letters)) + str(draw(numbers))
    if op is Op.RUN:
        target = draw(segments)
    elif op in (Op.SUM, Op.DECIDE):
        target = ""
    return Action(
        op,
        target,
        draw(st.sampled_from(STREAMS.get(op, (Stream.COMPUTE,)))),
        draw(numbers) if op in TO_SLOT | FROM_SLOT else None,
        draw(segments) if op in LANDINGS else None,
        tuple(draw(st.lists(labels, max_size=4))),
    )


@pytest.mark.parametrize("op", Op)
@given(data=st.data())
def test_text_form_parses_back(op: Op, data: st.DataObject) -> None:
    action = data.draw(actions(op))
    assert parse(str(action)) == action
    assert "\n" not in str(action)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("fetch c12 -> d3 @h2d after f9 s4", Action(Op.FETCH, "c12", Stream.H2D, 3, waits=("f9", "s4"))),
        ("open c12 -> d3 @h2d", Action(Op.OPEN, "c12", Stream.H2D, 3)),
        ("evict c12 <- d3 @d2h", Action(Op.EVICT, "c12", Stream.D2H, 3)),
        ("drop c1 <- d0 @compute after b7", Action(Op.DROP, "c1", Stream.COMPUTE, 0, waits=("b7",))),
        ("gather g4 @comm", Action(Op.GATHER, "g4", Stream.COMM)),
        ("reduce g4 @comm", Action(Op.REDUCE, "g4", Stream.COMM)),
        ("release g4 @compute", Action(Op.RELEASE, "g4", Stream.COMPUTE)),
        ("run fwd.17 @compute after f11", Action(Op.RUN, "fwd.17", Stream.COMPUTE, waits=("f11",))),
        ("stash c12 of bwd.17 @compute", Action(Op.STASH, "c12", Stream.COMPUTE, source="bwd.17")),
        ("add c12 of bwd.17 @compute", Action(Op.ADD, "c12", Stream.COMPUTE, source="bwd.17")),
        ("sum @comm after b7", Action(Op.SUM, "", Stream.COMM, waits=("b7",))),
        ("decide @compute after s0", Action(Op.DECIDE, "", Stream.COMPUTE, waits=("s0",))),
        ("update c12 @cpu", Action(Op.UPDATE, "c12", Stream.CPU)),
        ("load os7 -> d9 @h2d", Action(Op.LOAD, "os7", Stream.H2D, 9)),
        ("store os7 <- d9 @d2h", Action(Op.STORE, "os7", Stream.D2H, 9)),
        ("offload a5 @d2h after f9", Action(Op.OFFLOAD, "a5", Stream.D2H, waits=("f9",))),
        ("discard a5 @compute after f12", Action(Op.DISCARD, "a5", Stream.COMPUTE, waits=("f12",))),
        ("allocate a5 @compute", Action(Op.ALLOCATE, "a5", Stream.COMPUTE)),
        ("reload a5 @h2d after b3", Action(Op.RELOAD, "a5", Stream.H2D, waits=("b3",))),
    ],
)
def test_text_form_is_the_documented_one(text: str, action: Action) -> None:
    assert str(action) == text
    assert parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fetch",
        "fetch c1 @h2d",
        "fetch c1 <- d0 @h2d",
        "fetch c1 -> d0 @d2h",
        "fetch c1 -> d0 @warp",
        "fetch os1 -> d0 @h2d",
        "fetch c1 -> d0 @h2d after",
        "fetch c1 -> d0 @h2d after 12",
        "fetch c1 -> d0 @h2d and more",
        "evict c1 -> d0 @d2h",
        "load c1 -> d0 @h2d",
        "run c1 @compute",
        "run fwd.1 @cpu",
        "run fwd.1 -> d0 @compute",
        "stash c1 @compute",
        "norm c1 of bwd.0 @compute",
        "decide c1 @compute",
        "sum @compute",
        "sum g1 @comm",
        "update g1 @cpu",
        "gather g1 @compute",
        "gather c1 @comm",
        "norm c1 @cpu",
        "decide @cpu",
        "grow 4096 @compute",
        "paint c1 @compute",
    ],
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "index"), [("fetch c12 -> d3 @h2d", 12), ("load os7 -> d9 @h2d", 7), ("run bwd.17 @compute", 17)]
)
def test_index_is_the_number_of_the_target(text: str, index: int) -> None:
    assert parse(text).index == index
