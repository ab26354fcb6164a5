"""The panels, lines, marks and texts of the picture."""

from collections.abc import Iterable

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from tandem_client.plot.chart import KIND_COLOURS
from tests.client.plot.step_logs import LANES, LINES, decode_steps, figure, line, panels

LABELS = [
    *("running", "waiting", "worker lost", "worker joined", "preemption", "prefill step", "decode step", "mixed step"),
]
by_both = pytest.mark.parametrize("by_time", [False, True], ids=["by step", "by time"])


def texts(found: Iterable[Text]) -> list[str]:
    return [each.get_text() for each in found]


def test_a_step_s_value_holds_from_its_begin_to_its_end() -> None:
    requests = panels(figure())["requests"]
    styles = {one.get_label(): one.get_drawstyle() for one in requests.lines}
    assert styles == dict.fromkeys(("running", "waiting"), "steps-pre")
    assert line(requests, "running")[:3] == [(0, 0), (1, 1), (2, 2)]


@by_both
@pytest.mark.parametrize("lines", [LINES, LANES, decode_steps(5000)], ids=["one worker", "two workers", "many steps"])
def test_running_and_used_pages_end_at_zero(lines: tuple[str, ...], by_time: bool) -> None:
    drawn = panels(figure(lines, by_time=by_time))
    for points in (line(drawn["requests"], "running"), line(drawn["pages"], "pages used")):
        assert points[-2][0] == points[-1][0] and points[-2][1] > 0 and points[-1][1] == 0


def test_the_strip_colours_each_step_by_its_kind() -> None:
    patches = panels(figure())["kinds"].patches
    shown = {
        patch.get_label(): (np.flatnonzero(patch.get_data().values - patch.get_data().baseline) + 1).tolist()
        for patch in patches
    }
    assert shown == {"prefill step": [1, 4], "mixed step": [2], "decode step": [3, 5, 6]}
    assert {patch.get_label().split()[0]: to_hex(patch.get_facecolor()).upper() for patch in patches} == KIND_COLOURS


def test_preemptions_are_marked_in_the_panel_of_rates() -> None:
    rates = panels(figure())["rates"]
    assert rates.get_ylabel() == "tokens/s"
    assert line(rates, "preemption") == [(3, 0.06)]


def test_milliseconds_have_the_colour_of_their_kind() -> None:
    times = panels(figure())["times"]
    assert line(times, "prefill") == [(1, 80), (4, 90)]
    assert line(times, "decode") == [(3, 20), (5, 20), (6, 10)]
    assert {one.get_label(): one.get_color() for one in times.lines} == KIND_COLOURS
    assert times.get_yscale() == "log"


def test_resets_and_joins_are_lines_across_the_panels() -> None:
    drawn = panels(figure())
    for name in ("requests", "rates", "pages", "times"):
        marks = {
            mark.get_label(): [segment[0][0] for segment in mark.get_segments()]
            for mark in drawn[name].collections
            if str(mark.get_label()).startswith("worker")
        }
        assert marks == {"worker lost": [3], "worker joined": [0, 3]}


def test_time_without_a_worker_is_shaded() -> None:
    [band] = panels(figure(by_time=True))["requests"].patches
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((0.3, 2.3))


def test_bars_give_seconds_and_share_of_each_kind() -> None:
    shares = panels(figure())["shares"]
    assert [round(bar.get_width(), 6) for bar in shares.patches] == [0.17, 0.05, 0.06]
    assert [text.split("\n")[0] for text in texts(shares.texts)] == ["61%  (0.17 s)", "18%  (0.05 s)", "21%  (0.06 s)"]
    assert "0.3 s stepping, 3.2 s idle" in shares.get_title()


def test_boxes_give_the_median_of_each_kind_and_lane() -> None:
    kinds = ["decode\n20.00 ms", "mixed\n60.00 ms"]
    assert texts(panels(figure())["spread"].get_yticklabels()) == ["prefill\n85.00 ms", *kinds]
    lanes = ["lane 1, decode\n20.00 ms", "lane 2, decode\n50.00 ms"]
    assert texts(panels(figure(LANES))["spread"].get_yticklabels()) == ["prefill\n57.50 ms", kinds[0], *lanes]


def test_the_title_contains_the_token_rate_while_steps_run() -> None:
    title = figure().get_suptitle()
    assert "10 output tokens  ·  36 tokens/s while stepping  ·  1 worker lost, 2.0 s without a worker" in title
    assert "  ·  2 workers  ·  " in figure(LANES).get_suptitle()


def test_the_name_of_a_file_is_not_read_as_a_formula() -> None:
    drawn = figure(name="a$x_{$b.csv")
    drawn.draw_without_rendering()
    assert "a$x_{$b.csv" in drawn.get_suptitle()


def test_legend_and_units_are_present() -> None:
    drawn = panels(figure(by_time=True))
    legend = drawn["requests"].get_legend()
    assert legend is not None
    assert texts(legend.get_texts()) == LABELS
    names = ("requests", "pages", "times", "shares", "spread")
    labels = {name: (drawn[name].get_xlabel(), drawn[name].get_ylabel()) for name in names}
    assert [labels[name][1] for name in names[:3]] == ["requests", "pages, %", "ms per step"]
    assert [labels[name][0] for name in names[2:]] == ["seconds", "seconds of the worker", "ms per step"]


@by_both
@pytest.mark.parametrize("lines", [LINES, LANES], ids=["one worker", "two workers"])
def test_texts_stay_within_the_picture(lines: tuple[str, ...], by_time: bool) -> None:
    drawn = figure(lines, by_time=by_time)
    drawn.draw_without_rendering()
    legend = drawn.axes[0].get_legend()
    assert legend is not None and drawn._suptitle is not None
    shown = [drawn._suptitle, *legend.get_texts()]
    for axes in drawn.axes:
        shown += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    shown = [text for text in shown if text.get_text()]
    assert len(shown) > 15
    for text in shown:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0, text.get_text()
        assert box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1, text.get_text()


@by_both
@pytest.mark.parametrize(
    "lines",
    [LINES[1:2], LINES[:2], ("1,0.0,decode,,1,0,1,0,1,1,1,0,20,0,1,1,0.0,0.0,1,1,1,0,20",)],
    ids=["a step", "a join and a step", "a step of no length"],
)
def test_one_step_is_enough_for_a_picture(lines: tuple[str, ...], by_time: bool) -> None:
    drawn = figure(lines, by_time=by_time)
    drawn.draw_without_rendering()
    assert line(panels(drawn)["requests"], "running")[-2][1] == 1
