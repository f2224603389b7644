"""Steps by a clock that the test turns."""

import pytest
from plans import evicting

from chunkc.ir.actions import Stream
from chunkc.runtime.model.optimizer_steps import StepLog


def test_a_step_lasts_from_the_end_of_the_one_before_and_holds_what_ran_meanwhile() -> None:
    now_s, stalls, plan = 10.0, {Stream.H2D: 1.0}, evicting().build()
    log = StepLog(lambda: dict(stalls), lambda: now_s)
    log.forward([plan, plan])
    log.end()
    assert log.latest is None and log.num_steps == 1, "nobody knows when the first step began"
    log.forward([plan])
    log.forward([plan])
    now_s, stalls = 12.5, {Stream.H2D: 1.25, Stream.CPU: 0.5}
    log.end()
    assert log.latest is not None and log.num_steps == 2
    assert log.latest.elapsed_s == 2.5
    assert log.latest.calls == ((plan,), (plan,))
    assert log.latest.stalled_s == pytest.approx({Stream.H2D: 0.25, Stream.CPU: 0.5})
    now_s = 13.0
    log.end()
    assert (log.latest.elapsed_s, log.latest.calls) == (0.5, ())
    assert log.latest.stalled_s == {Stream.H2D: 0.0, Stream.CPU: 0.0}
