"""What is told of long work: stages, labels, counts with the time left; who is told, and where nobody is."""

from types import SimpleNamespace

import pytest
from progress_recorder import Recorder

import chunkc.progress
from chunkc.progress import Counted, make_way, observed_by, shown, stage, within


def test_stages_go_to_the_observer_of_the_block_and_to_nobody_else() -> None:
    recorder = Recorder()
    stage("before")
    with observed_by(recorder):
        stage("planning")
        make_way()
    stage("behind")
    make_way()
    assert (recorder.texts, recorder.num_ways) == (["planning"], 1)


def test_labels_stand_before_the_stages_of_their_block_also_after_an_error() -> None:
    recorder = Recorder()
    with observed_by(recorder), within("2/7"):
        with pytest.raises(ZeroDivisionError), within("gpt-10b"):
            stage("planning")
            raise ZeroDivisionError
        stage("modelling")
    with observed_by(recorder):
        stage("simulating")
    assert recorder.texts == ["2/7: gpt-10b: planning", "2/7: modelling", "simulating"]


def test_the_time_left_is_that_of_the_pieces_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(chunkc.progress, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    recorder = Recorder()
    with observed_by(recorder):
        counted = Counted("compiling", 9, "segments", "cached for next time")
        for elapsed_s in (0.25, 4.0, 2.0, 60.0, 240.0):
            clock.now_s += elapsed_s
            counted.advance()
    assert recorder.texts == [
        "compiling 0/9 segments; cached for next time",
        "compiling 1/9 segments; cached for next time",  # a quarter of a second tells nothing yet
        "compiling 2/9 segments, about 15 s; cached for next time",  # 4.25 / 2 * 7 = 14.9
        "compiling 3/9 segments, about 10 s; cached for next time",  # 6.25 / 3 * 6 = 12.5
        "compiling 4/9 segments, about 85 s; cached for next time",  # 66.25 / 4 * 5 = 82.8
        "compiling 5/9 segments, about 4 min; cached for next time",  # 306.25 / 5 * 4 = 245
    ]


def test_the_last_piece_and_no_piece_show_nothing() -> None:
    recorder = Recorder()
    with observed_by(recorder):
        Counted("compiling", 0, "segments")
        Counted("compiling", 1, "segments").advance()
    assert recorder.texts == ["compiling 0/1 segments"]


def test_whoever_is_told_already_stays_so() -> None:
    recorder = Recorder()
    with observed_by(recorder), shown():
        stage("planning")
    assert recorder.texts == ["planning"]


@pytest.mark.parametrize("is_first_rank", [True, False])
def test_only_the_first_rank_shows_anything(
    is_first_rank: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHUNKC_PROGRESS", "1")
    with shown(is_first_rank=is_first_rank):
        stage("planning")
    stage("behind")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("chunkc: planning\n" if is_first_rank else "")
