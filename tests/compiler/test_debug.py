"""The debug ladder: what each rung logs, what it refuses, and that it leaves logging as it was."""

import logging
import sys
from dataclasses import replace

import pytest
from plans_for_report import gpt_plan

from chunkc.compiler.debug import debug_level, explain, visible
from chunkc.errors import ChunkcError
from chunkc.report import full_text, render, summarize

CODE = {"fwd.0": "def call(args):\n    return args"}


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    plan = gpt_plan()
    caplog.clear()
    explain(plan, plan.stages, CODE)
    assert {(r.name, r.levelno) for r in caplog.records} <= {("chunkc", logging.INFO)}
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("level", range(6))
def test_each_rung_adds_to_the_one_below(
    level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = gpt_plan()
    monkeypatch.setenv("CHUNKC_DEBUG", str(level))
    stages = ["pass liveness (1.2 ms): peak non-model bytes at bwd.0", "pass chunk_mapping (12.5 ms): 17 chunks"]
    rungs = [[summarize(plan)], [render(plan)], stages, [full_text(plan)], ["code of fwd.0:\n" + CODE["fwd.0"]]]
    assert debug_level() == level
    assert logged(caplog) == [text for rung in rungs[:level] for text in rung]


@pytest.mark.parametrize("value", [None, "", " "])
def test_unset_means_nothing(
    value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CHUNKC_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("CHUNKC_DEBUG", value)
    assert debug_level() == 0
    assert logged(caplog) == []


@pytest.mark.parametrize("value", ["6", "-1", "two", "1.0", "01", "１"])  # noqa: RUF001
def test_a_bad_value_is_refused_with_what_is_allowed(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_DEBUG", value)
    with pytest.raises(ChunkcError, match=r"CHUNKC_DEBUG=.* is not allowed.*1 summary.*5 generated code") as caught:
        debug_level()
    assert not isinstance(caught.value, ValueError)


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CHUNKC_DEBUG", "1")
    plan = gpt_plan()
    explain(replace(plan, layout=replace(plan.layout, rank=1)), plan.stages, CODE)
    assert caplog.records == []


def test_without_a_handler_it_is_seen_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("chunkc.test_debug")
    logger.propagate = False
    with visible(logger):
        logger.info("plan text")
    assert capsys.readouterr().err == "plan text\n"
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)


def test_a_configured_program_is_not_told_twice(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("chunkc.test_debug_handled")
    logger.propagate = False
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    with visible(logger):
        logger.info("plan text")
    assert tuple(capsys.readouterr()) == ("plan text\n", "")
    assert logger.handlers == [handler]
