"""Plans that move saved values, broken in one action, wait or claim."""

from dataclasses import replace

from mutations_actions import Mutation
from plans import moving

from chunkc.ir.plan import MovedValue

VALUE = MovedValue(0, 300, 0, 1, (2, 3))

VALUES: list[Mutation] = [
    (
        "value leaves before its last reader",
        lambda: (
            moving()
            .delete("forward", 4)
            .delete("forward", 4)
            .insert("forward", 2, "offload a0 @d2h after f1")
            .insert("forward", 3, "discard a0 @compute after f2")
        ),
        (r"forward f5 `run fwd\.1", "it reads a0, which is away"),
    ),
    (
        "value leaves without a copy",
        lambda: moving().delete("forward", 4),
        (r"forward f4 `discard a0", "a0 has no copy yet"),
    ),
    (
        "value leaves before its copy is complete",
        lambda: moving().without_wait("forward", 5, "f4"),
        (r"forward f5 `discard a0", "writes a0", r"f4 `offload a0"),
    ),
    (
        "copied before it is complete",
        lambda: moving().set("forward", 4, "offload a0 @d2h"),
        (r"forward f4 `offload a0", "reads a0", r"f1 `run fwd\.0"),
    ),
    (
        "copied before it is made",
        lambda: moving().delete("forward", 4).insert("forward", 0, "offload a0 @d2h"),
        (r"forward f0 `offload a0", "a0 is absent"),
    ),
    (
        "read before it is back",
        lambda: moving().set("backward", 9, "run bwd.2 @compute after b7"),
        (r"backward b9 `run bwd\.2", "reads a0", r"b8 `reload a0"),
    ),
    (
        "reloaded behind its reader",
        lambda: moving().delete("backward", 8).insert("backward", 9, "reload a0 @h2d after b3"),
        (r"backward b8 `run bwd\.2", "it reads a0, which is empty"),
    ),
    (
        "never reloaded",
        lambda: moving().delete("backward", 8).delete("backward", 3),
        (r"backward b7 `run bwd\.2", "it reads a0, which is away"),
    ),
    (
        "computed again from what is gone",
        lambda: moving().but(moves=(replace(VALUE, read_by=(0, 3)),)),
        (r"backward b\d+ `run bwd\.0", "it reads a0, which is away"),
    ),
    (
        "reloaded before it has memory",
        lambda: moving().delete("backward", 3),
        (r"backward b7 `reload a0", "a0 is away, not empty"),
    ),
    (
        "reloaded without waiting for its memory",
        lambda: moving().without_wait("backward", 8, "b3"),
        (r"backward b8 `reload a0", "writes a0", r"b3 `allocate a0"),
    ),
    (
        "has memory twice",
        lambda: moving().insert("backward", 4, "allocate a0 @compute"),
        (r"backward b4 `allocate a0", "a0 is empty, not away"),
    ),
    (
        "bytes that are not away",
        lambda: moving().but(
            segments=tuple(replace(s, away_nbytes=300 if s.name == "fwd.1" else 0) for s in moving().segments)
        ),
        (r"forward f3 `run fwd\.1", "300 bytes of moved values are to be away, and 0 are"),
    ),
    (
        "more away than alive",
        lambda: moving().but(segments=tuple(replace(s, away_nbytes=901) for s in moving().segments)),
        ("fwd.0 has 900 live bytes, of which 901 away",),
    ),
    (
        "a value that does not move",
        lambda: moving().set("forward", 4, "offload a1 @d2h after f3"),
        (r"forward f4 `offload a1", "no a1"),
    ),
    (
        "moved in the step",
        lambda: moving().insert("step", 0, "reload a0 @h2d"),
        (r"step s0 `reload a0", "no place in program step"),
    ),
    (
        "moved twice",
        lambda: moving().but(moves=(VALUE, VALUE)),
        ("saved value a0 is moved twice",),
    ),
    (
        "a value of no bytes",
        lambda: moving().but(moves=(replace(VALUE, nbytes=0),)),
        ("a0 of 0 bytes",),
    ),
    (
        "read by what is no operator",
        lambda: moving().but(moves=(replace(VALUE, read_by=(2, 4)),)),
        ("a0 is made by operator 0", "read by 2 to 4"),
    ),
    (
        "copies beyond the host budget",
        lambda: moving().but(host_budget=3 * 1024 + 299),
        ("homes and copies take 3372 host bytes", "budget is 3371"),
    ),
    (
        "copies not counted",
        lambda: moving().but(changes={"memory": replace(moving().build().memory, host_nbytes=3072)}),
        ("memory states 3072 host bytes, homes and copies take 3372",),
    ),
]
