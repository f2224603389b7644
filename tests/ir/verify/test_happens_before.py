"""Order and races on streams, waits, programs and joins, in cases small enough to read."""

from chunkc.ir.actions import parse
from chunkc.ir.plan import Position, Program, Role, State
from chunkc.ir.verify.happens_before import Accesses, Event, HappensBefore


def issue(order: HappensBefore, role: Role, *texts: str, position: Position = "first", number: int = 0) -> list[Event]:
    numbers = tuple(range(number, number + len(texts)))
    actions = tuple(parse(t) for t in texts)
    program = Program(role, State("cold"), State("cold"), actions, position, numbers=numbers)
    order.begin(program)
    return [order.issue(program, position, "") for position in range(len(texts))]


def test_a_stream_is_in_order_and_streams_are_not() -> None:
    a, b, c = issue(HappensBefore(), "forward", "fetch c0 -> d0 @h2d", "fetch c1 -> d1 @h2d", "run fwd.0 @compute")
    assert b.follows(a) and not a.follows(b)
    assert not c.follows(a) and not c.follows(b)


def test_a_wait_orders_everything_before_it() -> None:
    a, b, c, d = issue(
        HappensBefore(),
        "forward",
        "fetch c0 -> d0 @h2d",
        "fetch c1 -> d1 @h2d",
        "run fwd.0 @compute after f1",
        "evict c0 <- d0 @d2h after f2",
    )
    assert c.follows(a) and c.follows(b) and d.follows(a) and d.follows(c)


def test_a_label_means_the_latest_run_of_its_role() -> None:
    order = HappensBefore()
    (never,) = issue(order, "forward", "fetch c0 -> d0 @h2d after s0")
    (first,) = issue(order, "step", "update c0 @cpu")
    (second,) = issue(order, "step", "update c0 @cpu")
    (after,) = issue(order, "forward", "fetch c0 -> d0 @h2d after s0")
    assert not never.follows(first) and after.follows(second) and after.follows(first)


def test_a_label_left_out_means_that_of_an_earlier_micro_batch_of_the_step() -> None:
    order = HappensBefore()
    (opened, _) = issue(order, "backward", "open c1 -> d1 @h2d", "run bwd.0 @compute")
    issue(order, "backward", "run bwd.0 @compute", position="later", number=1)
    (last,) = issue(order, "backward", "reduce g0 @comm after b0", position="last", number=1)
    issue(order, "backward", "run bwd.0 @compute", number=1)
    (next_step,) = issue(order, "backward", "gather g0 @comm after b0", position="last", number=2)
    (alone,) = issue(HappensBefore(), "backward", "reduce g0 @comm after b0", number=1)
    assert last.follows(opened) and next_step.clock[0] == last.clock[0] and alone.clock[1:3] == (0, 0)


def test_programs_do_not_join_and_transitions_do() -> None:
    order = HappensBefore()
    (a,) = issue(order, "step", "update c0 @cpu")
    (b,) = issue(order, "forward", "run fwd.0 @compute")
    order.join()
    (c,) = issue(order, "forward", "fetch c0 -> d0 @h2d")
    assert not b.follows(a) and c.follows(a) and c.follows(b)


def test_races() -> None:
    """Write after read, read after write and write after write on overlapping names; reads never race."""
    a, b, c = issue(
        HappensBefore(), "forward", "fetch c0 -> d0 @h2d", "run fwd.0 @compute", "run fwd.1 @compute after f0"
    )
    both = {"x": ("x", "y"), "y": ("x", "y")}
    for other in ("x", "y"):
        written, read = Accesses(both), Accesses(both)
        assert written.write("x", a) is None
        assert written.read(other, b) is a and written.write(other, b) is a and written.read(other, c) is None
        assert read.read("x", a) is None and read.read(other, b) is None
        assert read.write(other, b) is a
    assert Accesses({}).write("x", a) is None
