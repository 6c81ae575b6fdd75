"""The same chart in a terminal, as SVG, as PNG and on a page."""

import importlib.util
import struct
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from isthmus.errors import UserError
from isthmus.observe.draw import (
    Box,
    Label,
    Path,
    Section,
    Table,
    draw_chart,
    draw_curve,
    draw_text,
    to_html,
    to_png,
    to_svg,
)
from isthmus.observe.timeline import Chart, chart_of_step
from isthmus.plan.scenario import Policy
from isthmus.plan.simulated import simulate_scenario
from tests.plan.scenarios import pipeline, stage

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def chart() -> Chart:
    """F0 F1 B0 B1 on two stages, 12 s long; transfers take 1.5 s."""
    return chart_of_step(
        simulate_scenario(pipeline(2, 2, serialise_s=0.5, latency_s=1.0, policy=Policy.GPIPE))
    )


def test_the_terminal_tells_all_kinds_apart_without_colour(chart: Chart) -> None:
    lines = draw_text(chart, width=13 + 2 + 24).plain.splitlines()
    assert lines[:4] == [
        "cloud0        0░1░············0▓▓▓1▓▓▓",
        "cloud0→cloud1   ──═─>                 ",
        "cloud1→cloud0              ──> ──>    ",
        "cloud1        ·····0░1░0▓▓▓1▓▓▓·······",
    ]
    assert "12 s" in lines[4]
    for word in ("forward", "backward", "under way", "bubble"):
        assert word in lines[5]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_form_fits_the_width(chart: Chart, width: int) -> None:
    tracks = draw_text(chart, width=width).plain.splitlines()[: len(chart.tracks)]
    assert all(len(line) <= width for line in tracks)


def test_hidden_ranks_are_said(chart: Chart) -> None:
    assert "ranks not shown: 5" in draw_text(replace(chart, num_hidden_ranks=5), width=80).plain


def test_svg_has_a_box_with_a_word_for_every_span_and_bubble(chart: Chart) -> None:
    root = ElementTree.fromstring(to_svg(draw_chart(chart, title="predicted <1>")))
    titles = [one.text for one in root.iter(f"{SVG}title")]
    assert sum("forward 0." in (one or "") and "transfer" not in (one or "") for one in titles) == 4
    assert sum("transfer" in (one or "") for one in titles) == 4
    assert sum((one or "").startswith("bubble") for one in titles) == sum(
        len(track.bubbles) for track in chart.tracks
    )
    assert "cloud0→cloud1: forward 0.0, transfer, 1.5 s, 488.3 KiB" in titles
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert "predicted <1>" in texts
    assert {"0", "1"} <= set(texts)


def test_boxes_lie_within_the_picture_and_as_long_as_their_spans(chart: Chart) -> None:
    drawing = draw_chart(chart, width=800)
    boxes = [one for one in drawing.shapes if isinstance(one, Box)]
    assert all(
        one.x >= 0 and one.x + one.width <= 800 and one.y + one.height <= drawing.height for one in boxes
    )
    by_kind = {
        kind: [one.width for one in boxes if f", {kind}," in one.title] for kind in ("forward", "backward")
    }
    assert by_kind["backward"][0] == pytest.approx(2 * by_kind["forward"][0], abs=1.0)


def test_numbers_are_left_out_where_boxes_are_too_narrow() -> None:
    chart = chart_of_step(simulate_scenario(pipeline(2, 200, serialise_s=0.1, latency_s=0.5)))
    labels = [one for one in draw_chart(chart, width=400).shapes if isinstance(one, Label)]
    assert not any(one.text == "150" for one in labels)


def test_an_update_without_length_is_not_drawn(chart: Chart) -> None:
    assert "update" not in draw_text(chart, width=80).plain
    scenario = replace(pipeline(1, 2), stages=(stage(0, update_s=0.5),))
    assert "update" in draw_text(chart_of_step(simulate_scenario(scenario)), width=80).plain


def test_a_page_holds_its_pictures_and_tables_and_no_foreign_markup(chart: Chart) -> None:
    table = Table(header=("a", "b"), rows=(("<script>", "1"),))
    page = to_html("A & B", [Section(heading="One", parts=("words", table, draw_chart(chart)))])
    assert page.count("<svg") == 1
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_curves_stay_inside() -> None:
    curve = draw_curve([(0, 3.0), (1, 2.0), (5, 1.0)], width=300, height=100, word="step")
    points = [point for one in curve.shapes if isinstance(one, Path) for point in one.points]
    assert all(0 <= x <= 300 and 0 <= y <= 100 for x, y in points)
    assert draw_curve([(3, 1.0)], width=300, height=100, word="step").shapes


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is an extra")
def test_png_has_twice_the_pixels_of_the_drawing(chart: Chart) -> None:
    drawing = draw_chart(chart, width=400)
    content = to_png(drawing)
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (800, round(2 * drawing.height))


def test_png_without_pillow_names_the_cure(chart: Chart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match="Pillow") as raised:
        to_png(draw_chart(chart))
    assert "pip install" in (raised.value.hint or "")
