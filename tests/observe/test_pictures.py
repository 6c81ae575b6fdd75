"""The same chart in a terminal, as SVG and on a page."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import escape

import pytest

from isthmus.observe.draw import Table, draw_chart, draw_curve, draw_text, paragraph, to_html
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
    root = ElementTree.fromstring(draw_chart(chart, title="predicted <1>"))
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
    root = ElementTree.fromstring(draw_chart(chart, width=800))
    boxes = [one for one in root.iter(f"{SVG}rect") if one.get("x")]
    assert boxes
    for one in boxes:
        x, y, width, height = (float(one.get(key, "")) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + width <= 800
        assert y + height <= float(root.get("height", ""))
    forward_s, backward_s = (
        next(float(one.get("width", "")) for one in boxes if f", {kind}," in one.findtext(f"{SVG}title", ""))
        for kind in ("forward", "backward")
    )
    assert backward_s == pytest.approx(2 * forward_s, abs=1.0)


def test_numbers_are_left_out_where_boxes_are_too_narrow() -> None:
    chart = chart_of_step(simulate_scenario(pipeline(2, 200, serialise_s=0.1, latency_s=0.5)))
    assert ">150<" not in draw_chart(chart, width=400)


def test_an_update_without_length_is_not_drawn(chart: Chart) -> None:
    assert "update" not in draw_text(chart, width=80).plain
    scenario = replace(pipeline(1, 2), stages=(stage(0, update_s=0.5),))
    assert "update" in draw_text(chart_of_step(simulate_scenario(scenario)), width=80).plain


def test_a_page_holds_its_pictures_and_tables_and_no_foreign_markup(chart: Chart) -> None:
    table = Table(header=("a", "b"), rows=(("<script>", "1"),))
    page = to_html("A & B", {"One": [paragraph("<b>"), table.to_html(), draw_chart(chart)]})
    assert page.count("<svg") == 1
    for markup in ("<script>", "<b>"):
        assert markup not in page
        assert escape(markup) in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_curves_stay_inside() -> None:
    root = ElementTree.fromstring(
        draw_curve([(0, 3.0), (1, 2.0), (5, 1.0)], width=300, height=100, word="step")
    )
    lines = [one.get("points", "").split() for one in root.iter(f"{SVG}polyline")]
    points = [tuple(map(float, point.split(","))) for one in lines for point in one]
    assert all(0 <= x <= 300 and 0 <= y <= 100 for x, y in points)
    assert draw_curve([(3, 1.0)], width=300, height=100, word="step")
