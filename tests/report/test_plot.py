"""Pictures: size, contents, equal files for equal plans, and what is said where one cannot be drawn."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from costs import RATES, with_work
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text
from plans import chain, distributed, evicting, resident

from chunkc.cost import simulate_with
from chunkc.errors import ChunkcError
from chunkc.ir.plan import Plan
from chunkc.report.colours import KIND_COLOURS, WORK_COLOURS
from chunkc.report.frame import Work
from chunkc.report.memory_curve import Kind
from chunkc.report.plot import drawn, picture, plot

PLAN = with_work(evicting().build(), 3)
TIMELINE = simulate_with(PLAN, RATES)
DIVIDED = with_work(distributed().build(), 3)


SHAPES = {"short": evicting(), "resident": resident(), "ranks": distributed(), "30": chain(30), "400": chain(400)}


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(imread(io.BytesIO(data)))[..., :3]


def share_of(image: np.ndarray, colour: str) -> float:
    return float(np.mean(np.all(np.abs(image - np.array(to_rgb(colour))) < 0.01, axis=-1)))


@pytest.mark.long(but="size1")
@pytest.mark.parametrize("size", [(1920, 1080), (1200, 800)])
def test_a_picture_has_the_asked_size_and_shows_what_there_is(tmp_path: Path, size: tuple[int, int]) -> None:
    plot(PLAN, TIMELINE, tmp_path / "plan.png", size=size)
    image = pixels((tmp_path / "plan.png").read_bytes())
    assert image.shape == (size[1], size[0], 3)
    assert 0.2 < np.mean(np.all(image == 1.0, axis=-1)) < 0.8
    shown = (KIND_COLOURS[Kind.PARAMETERS], KIND_COLOURS[Kind.NONMODEL], KIND_COLOURS[Kind.GRADIENTS])
    for colour in (*shown, WORK_COLOURS[Work.FORWARD], WORK_COLOURS[Work.BACKWARD], WORK_COLOURS[Work.UPDATE]):
        assert share_of(image, colour) > 0.002
    assert share_of(image, WORK_COLOURS[Work.REDUCE]) == share_of(image, KIND_COLOURS[Kind.STATES]) == 0.0


@pytest.mark.long
def test_memory_takes_the_share_of_the_panel_that_it_has_of_time_and_bytes() -> None:
    """Twice the non-model bytes cover twice the pixels, since the budget makes the axis."""
    areas = []
    for factor in (1, 2):
        segments = tuple(replace(s, live_nbytes=factor * 400, workspace_nbytes=0) for s in PLAN.segments)
        memory = replace(PLAN.memory, device_budget_nbytes=4000, nonmodel_nbytes=factor * 400)
        plan = replace(PLAN, segments=segments, memory=memory)
        image = pixels(picture(plan, simulate_with(plan, RATES)))
        areas.append(share_of(image[:, : int(0.84 * image.shape[1])], KIND_COLOURS[Kind.NONMODEL]))
    assert areas[1] == pytest.approx(2 * areas[0], rel=0.06)


@pytest.mark.long
def test_figures_share_nothing() -> None:
    others = [with_work(resident().build(), 2), distributed().build(), chain(200).build()]
    first = picture(PLAN, TIMELINE)
    found = [picture(plan, None) for plan in others]
    assert picture(PLAN, TIMELINE) == first and len({first, *found}) == 4
    pyplot = sys.modules.get("matplotlib.pyplot")  # which other libraries may have imported
    assert pyplot is None or not pyplot.get_fignums()


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".PNG"])
def test_the_name_says_the_form(tmp_path: Path, suffix: str) -> None:
    plot(PLAN, None, tmp_path / f"plan{suffix}")
    start = {".svg": b"<?xml", ".pdf": b"%PDF", ".PNG": b"\x89PNG"}[suffix]
    assert (tmp_path / f"plan{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_texts_lie_inside_the_picture_and_apart(name: str, timed: bool) -> None:
    plan = replace(with_work(SHAPES[name].build(), 3), num_tokens=7, model="A model with a name of some length")
    figure = drawn(plan, simulate_with(plan, RATES) if timed else None, (1600, 900))
    FigureCanvasAgg(figure).draw()
    boxes = [t.get_window_extent() for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [box for box in boxes if box.width and box.height]
    assert len(boxes) > 20
    for i, box in enumerate(boxes):
        assert 0 <= box.x0 and box.x1 <= 1600 and 0 <= box.y0 and box.y1 <= 900
        assert not any(box.overlaps(other) for other in boxes[:i])


def svg(plan: Plan, *, timed: bool) -> str:
    return picture(plan, simulate_with(plan, RATES) if timed else None, "svg").decode()


def test_texts_with_times() -> None:
    found = svg(replace(PLAN, num_tokens=7), timed=True)
    for text in (
        "Toy on",
        "step 29 ms, simulated",
        "241.4 tokens/s",
        "bound by computing on the device",
        "device waits",
        "82.8 % busy",
    ):
        assert f"<!-- {text}" in found or text in found
    assert "milliseconds of one steady iteration" in found and "widths are no times" not in found


def test_without_times_the_axis_says_so() -> None:
    found = svg(PLAN, timed=False)
    assert "widths are no times" in found and "step time unknown" in found and "7 actions" in found
    assert "device waits" not in found and "busy" not in found


@pytest.mark.parametrize("timed", [True, False])
def test_streams_have_words_for_names(timed: bool) -> None:
    figure = drawn(DIVIDED, simulate_with(DIVIDED, RATES) if timed else None)
    names = [text.get_text().partition("\n")[0] for text in figure.axes[0].get_yticklabels()]
    assert names == ["host", "between ranks", "device to host", "host to device", "device"][::-1]


def texts_inside_bars(plan: Plan) -> list[str]:
    """By position on the device's lane."""
    axes = drawn(plan, simulate_with(plan, RATES), (1600, 900)).axes[0]
    row = max(axes.get_yticks())
    texts = [text for text in axes.texts if text.get_position()[1] == row]
    return [text.get_text() for text in sorted(texts, key=lambda text: text.get_position()[0])]


def test_bars_say_what_they_run_by_name_by_number_or_by_how_many_they_are() -> None:
    assert texts_inside_bars(PLAN)[:2] == ["fwd.0", "fwd.1"]
    numbers = [str(i) for i in range(30)]
    assert texts_inside_bars(with_work(chain(30).build(), 3)) == [*numbers, *numbers]
    assert texts_inside_bars(with_work(chain(400).build(), 3)) == ["400 segments", "400 segments"]


def test_signs_of_mathematics_in_a_name_are_letters() -> None:
    assert "Net$_x^$" in svg(replace(PLAN, model="Net$_x^$"), timed=False)


def test_another_form_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ChunkcError, match=r"\.png, \.svg, \.pdf"):
        plot(PLAN, TIMELINE, tmp_path / "plan.bmp")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ChunkcError, match=r"pip install 'chunkc\[plot\]'"):
        picture(PLAN, TIMELINE)
