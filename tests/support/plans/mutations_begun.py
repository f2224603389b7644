"""Plans whose updates begin before their step, broken in one action or wait."""

from dataclasses import replace

from mutations_actions import Mutation
from plans import begun, resident

BEGUN: list[Mutation] = [
    (
        "begun before the gradient came home",
        lambda: begun().without_wait("backward", 3, "b2"),
        (r"backward b3 `begin c2", "home 0 of c2", r"b2 `evict c2"),
    ),
    (
        "begun before the gradient landed",
        lambda: begun().delete("backward", 3).insert("backward", 1, "begin c2 @cpu"),
        (r"backward b1 `begin c2", "no gradient of 'w3' has landed in c2"),
    ),
    (
        "gradient replaced behind the begin",
        lambda: begun().move("backward", 2, 3).set("backward", 2, "begin c2 @cpu"),
        (r"backward b2 `begin c2|backward b3 `evict c2", "c2"),
    ),
    (
        "begun without a second home",
        lambda: begun().set("backward", 7, "begin c0 @cpu"),
        (r"backward b7 `begin c0", "c0 has (no gradients|no second home)|no gradient of .* has landed in c0"),
    ),
    ("begun twice", lambda: begun().insert("backward", 8, "begin c1 @cpu"), (r"backward b8 `begin c1", "begins twice")),
    (
        "begun in the step",
        lambda: begun().insert("step", 0, "begin c2 @cpu after b2"),
        (r"step s0 `begin c2", "no place in program step"),
    ),
    (
        "fetch that does not wait for the update",
        lambda: begun().without_wait("forward", 2, "s1"),
        (r"forward f2 `fetch c1", "home [01] of c1", r"s1 `update c1"),
    ),
    (
        "update of a second home on the device",
        lambda: begun().set("step", 2, "update c2 @compute").set("restore", 2, "restore c2 @compute"),
        (r"step s2 `update c2", "c2"),
    ),
    (
        "second home of what never leaves the device",
        lambda: resident().but(chunks=tuple(replace(c, has_second_home=True) for c in resident().chunks)),
        ("c0 has a second home", "not both at home off the device"),
    ),
    (
        "second homes beyond the host budget",
        lambda: begun().but(host_budget=3 * 1024),
        ("host bytes", "budget is 3072"),
    ),
]
