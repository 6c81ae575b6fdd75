"""Charts of known spans: their order, rows, bubbles and numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.events import Span
from isthmus.job.faults import CloudFault, CloudFaultKind
from isthmus.observe.timeline import (
    chart_of_step,
    clouds_in_order,
    lay_out,
    microbatch_of,
    step_bounds,
    total_s,
    union,
)
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulated import simulate_scenario
from tests.plan.scenarios import pipeline, scenarios


def span(kind: str, start_s: float, end_s: float, *, track: str = "east", name: str = "") -> Span:
    return Span(track=track, name=name or f"{kind} 0.0", kind=kind, start_s=start_s, end_s=end_s)


def test_tracks_follow_the_pipeline_with_the_lines_between_them() -> None:
    timeline = simulate_scenario(pipeline(3, 4, serialise_s=0.1, latency_s=0.5))
    assert [track.name for track in chart_of_step(timeline).tracks] == [
        "cloud0",
        "cloud0→cloud1",
        "cloud1→cloud0",
        "cloud1",
        "cloud1→cloud2",
        "cloud2→cloud1",
        "cloud2",
    ]


def test_of_many_ranks_some_are_shown_and_the_rest_counted() -> None:
    timeline = simulate_scenario(pipeline(2, 22, serialise_s=0.1, latency_s=0.5, num_ranks=11))
    chart = chart_of_step(timeline)
    names = [track.name for track in chart.tracks if not track.is_line]
    assert names == [f"cloud{cloud}/{rank}" for cloud in (0, 1) for rank in (0, 1)]
    assert chart.num_hidden_ranks == 18
    drawn = {microbatch_of(span) for track in chart.tracks for row in track.rows for span in row}
    assert drawn == {"0", "1", "11", "12"}


def test_the_beginning_of_a_step_ends_with_the_last_micro_batch_that_is_wanted() -> None:
    timeline = simulate_scenario(pipeline(2, 22, serialise_s=0.1, latency_s=0.5), num_steps=2)
    whole, beginning = (chart_of_step(timeline, num_microbatches=number) for number in (None, 3))
    assert whole.duration_s == pytest.approx(timeline.steps[1].duration_s)
    ends = [
        span.end_s - timeline.steps[1].start_s
        for span in timeline.spans
        if span.name.partition(" ")[2] in {"1.0", "1.1", "1.2"}
    ]
    assert beginning.end_s == pytest.approx(max(ends))
    assert beginning.duration_s < whole.duration_s / 2


def test_the_step_of_a_time_is_drawn() -> None:
    timeline = simulate_scenario(pipeline(2, 4, serialise_s=0.1, latency_s=0.5), num_steps=3)
    third = timeline.steps[2]
    chart = chart_of_step(timeline, at_s=third.start_s + 0.1)
    assert chart.duration_s == pytest.approx(third.duration_s)
    assert any(span.name == "forward 2.0" for track in chart.tracks for row in track.rows for span in row)


@given(scenarios(max_ranks=2))
def test_boxes_of_a_row_do_not_overlap_and_bubbles_fill_the_rest(scenario: Scenario) -> None:
    chart = chart_of_step(simulate_scenario(scenario, num_steps=2))
    for track in (one for one in chart.tracks if not one.is_line):
        (spans,) = track.rows or ((),)
        busy = union(
            (max(one.start_s, chart.start_s), min(one.end_s, chart.end_s)) for one in spans if one.duration_s
        )
        assert abs(total_s(busy) + total_s(track.bubbles) - chart.duration_s) < 1e-6


def test_what_overlaps_goes_to_another_row_and_only_so_many_rows_are_made() -> None:
    spans = [span("transfer", number, number + 10.0, track="east→west") for number in range(9)]
    chart = lay_out([span("forward", 0, 1), *spans], start_s=0.0, end_s=20.0)
    (line,) = (track for track in chart.tracks if track.is_line)
    assert [len(row) for row in line.rows] == [1, 1, 1, 1, 1, 4]


def test_steps_go_from_update_to_update() -> None:
    spans = [
        span("forward", 1, 2),
        span("optimize", 4, 5, name="optimize 0"),
        span("forward", 5, 6, name="forward 1.0"),
        span("optimize", 8, 9, name="optimize 1"),
        span("optimize", 3, 7, track="west", name="optimize 0"),
    ]
    assert step_bounds(spans, track="east") == [(1, 5), (5, 9)]
    assert step_bounds(spans[:1], track="east") == []


def test_clouds_are_ordered_by_when_the_first_activation_comes() -> None:
    spans = [span("forward", 5, 6, track="east/3"), span("forward", 1, 2, track="west/0")]
    assert clouds_in_order(spans) == ["west", "east"]


def test_a_box_shows_its_microbatch_and_an_update_shows_none() -> None:
    assert microbatch_of(span("forward", 0, 1, name="forward 12.3")) == "3"
    assert microbatch_of(span("optimize", 0, 1, name="optimize 12")) == ""


def test_a_run_that_ended_in_its_first_step_is_shown_as_far_as_it_came() -> None:
    gone = CloudFault(at_s=3.5, kind=CloudFaultKind.GONE, cloud="cloud1")
    chart = chart_of_step(simulate_scenario(pipeline(2, 4), faults=[gone]))
    assert (chart.start_s, chart.end_s) == (0.0, 3.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=8))
def test_no_span_is_left_out_of_a_line(times: list[tuple[int, int]]) -> None:
    spans = [span("transfer", at_s, at_s + length, track="east→west") for at_s, length in times]
    chart = lay_out([span("forward", 0, 1), *spans], start_s=0.0, end_s=20.0)
    lines = [track for track in chart.tracks if track.is_line]
    assert sum(len(row) for track in lines for row in track.rows) == len(spans)
