"""Laws of slow-downs."""

import pytest
from costs import calibration
from hypothesis import given
from hypothesis import strategies as st

from chunkc.cost.sharing import Capacities, Measured, Use
from chunkc.ir.actions import Stream

DEMANDS = st.dictionaries(st.sampled_from(["ram", "link"]), st.floats(0.1, 3.0))


@given(st.lists(DEMANDS, min_size=1, max_size=5))
def test_capacities_are_kept_and_more_company_never_helps(demands: list[dict[str, float]]) -> None:
    law = Capacities({"ram": 1.0, "link": 1.5})
    uses = tuple(Use(stream, tuple(d.items())) for stream, d in zip(Stream, demands, strict=False))
    speeds = law.speeds(uses)
    assert all(0 < s <= 1 for s in speeds)
    for resource, capacity in law.gb_per_s.items():
        used = sum(dict(u.demands).get(resource, 0.0) * s for u, s in zip(uses, speeds, strict=True))
        assert used <= capacity * (1 + 1e-9)
    fewer = law.speeds(uses[:-1])
    assert all(a >= b - 1e-12 for a, b in zip(fewer, speeds, strict=False))


def test_measured_factors_are_those_of_the_whole_set() -> None:
    law = Measured(calibration({("h2d", ("compute", "cpu")): 4.0}))
    assert law.speeds((Use(Stream.H2D),)) == (1.0,)
    uses = (Use(Stream.COMPUTE), Use(Stream.H2D), Use(Stream.CPU))
    assert law.speeds(uses) == (pytest.approx(1 / 2), pytest.approx(1 / 4), pytest.approx(1 / 2))


def test_measured_noise_never_speeds_up() -> None:
    law = Measured(calibration({("h2d", ("compute",)): 0.9, ("h2d", ("compute", "cpu")): 1.2}))
    assert law.speeds((Use(Stream.COMPUTE), Use(Stream.H2D)))[1] == 1.0
    assert law.speeds((Use(Stream.COMPUTE), Use(Stream.H2D), Use(Stream.CPU)))[1] == pytest.approx(1 / 1.5)


def test_collectives_were_not_measured_and_slow_nobody() -> None:
    law = Measured(calibration({}))
    assert law.speeds((Use(Stream.COMM), Use(Stream.H2D), Use(Stream.D2H))) == (1.0, 1 / 1.5, 1 / 1.5)
