"""A run that went as simulated, or slower, laid over its prediction."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.events import EventLog, Span
from isthmus.observe.report import find_run, read_run, report_on
from isthmus.observe.timeline import waits_of
from isthmus.plan.scenario import Scenario, scenario_to_dict
from isthmus.plan.simulate import Timeline
from isthmus.plan.simulated import simulate_scenario
from tests.plan.scenarios import pipeline

SCENARIO = pipeline(2, 8, serialise_s=0.5, latency_s=1.0)


def write_run(
    folder: Path, timeline: Timeline, *, scenario: Scenario | None = SCENARIO, slower: float = 1.0
) -> Path:
    """A run directory in which all that was simulated took so many times as long."""
    for cloud in ("cloud0", "cloud1"):
        with EventLog(folder / "events" / f"{cloud}.jsonl") as log:
            for one in timeline.spans:
                if one.track == cloud or one.track.endswith(f"→{cloud}"):
                    log.span(_stretched(one, slower))
            if cloud == "cloud0":
                for step in timeline.steps:
                    values = {
                        "step": step.step,
                        "loss": 5.0 - step.step,
                        "duration_s": slower * step.duration_s,
                    }
                    log.fact("step", values)
    if scenario is not None:
        plan = {
            "version": 1,
            "scenario": scenario_to_dict(scenario),
            "estimate": {"step_s": 1.0, "bubble": 0.3},
        }
        (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def _stretched(span: Span, factor: float) -> Span:
    return Span(
        track=span.track,
        name=span.name,
        kind=span.kind,
        start_s=1e9 + factor * span.start_s,
        end_s=1e9 + factor * span.end_s,
        num_bytes=span.num_bytes,
    )


def test_a_run_as_predicted_has_no_error(tmp_path: Path) -> None:
    found = report_on(write_run(tmp_path, simulate_scenario(SCENARIO, num_steps=4)))
    assert found.step.error == pytest.approx(0.0, abs=1e-6)
    errors = [one.error for one in found.durations if one.kind in ("forward", "backward", "transfer")]
    assert errors == pytest.approx([0.0] * 6, abs=1e-6)
    assert [one.error for one in found.bytes_per_step] == [0.0, 0.0]
    measured, predicted = ([one.busy for one in found.waits[how]] for how in ("measured", "predicted"))
    assert measured == pytest.approx(predicted, abs=1e-6)
    assert found.losses == ((0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0))


def test_a_run_that_took_twice_as_long_was_predicted_at_half(tmp_path: Path) -> None:
    found = report_on(write_run(tmp_path, simulate_scenario(SCENARIO, num_steps=3), slower=2.0))
    assert found.step.error == pytest.approx(-0.5)
    errors = [one.error for one in found.durations if one.kind == "forward"]
    assert errors == pytest.approx([-0.5, -0.5])
    measured, predicted = found.charts["measured"], found.charts["predicted"]
    assert measured.duration_s == pytest.approx(2 * predicted.duration_s, rel=1e-4)
    assert [one.name for one in measured.tracks] == [one.name for one in predicted.tracks]


def test_a_run_without_a_plan_still_has_its_measured_part(tmp_path: Path) -> None:
    found = report_on(write_run(tmp_path, simulate_scenario(SCENARIO, num_steps=3), scenario=None))
    assert found.step.predicted is None
    assert found.step.error is None
    assert found.step.measured is not None
    assert found.charts.keys() == {"measured"}
    assert not found.waits["predicted"]
    assert {one.kind for one in found.durations} == {"forward", "backward", "transfer", "optimize"}
    assert {one.error for one in found.durations} == {None}


def test_a_plan_of_another_format_is_said_in_one_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path, simulate_scenario(SCENARIO))
    (run / "plan.json").write_text('{"version": 9, "scenario": null}')
    with pytest.raises(UserError, match="no scenario of format"):
        read_run(run)


def test_a_folder_of_runs_stands_for_its_newest(tmp_path: Path) -> None:
    for name in ("2026a", "2026b"):
        write_run(tmp_path / name, simulate_scenario(SCENARIO))
    assert find_run(tmp_path) == tmp_path / "2026b"
    assert find_run(tmp_path / "2026a") == tmp_path / "2026a"
    with pytest.raises(UserError, match="holds no run"):
        find_run(tmp_path / "2026c")


def spans_of(*kinds_and_times: tuple[str, float, float]) -> Iterable[Span]:
    return [
        Span(track="east", name=f"{kind} 0.0", kind=kind, start_s=start_s, end_s=end_s)
        for kind, start_s, end_s in kinds_and_times
    ]


def test_waiting_is_told_by_what_follows() -> None:
    spans = spans_of(
        ("optimize", 0, 1), ("forward", 2, 3), ("forward", 4, 5), ("backward", 8, 10), ("optimize", 10, 11)
    )
    first, later = (waits_of(spans, cloud="east", is_first=one) for one in (True, False))
    assert first is not None
    assert later is not None
    assert (first.busy, first.other, first.for_activations, first.for_gradients) == (0.5, 0.2, 0.0, 0.3)
    assert (later.other, later.for_activations, later.for_other_stages) == (0.0, 0.2, 0.0)
    assert waits_of(spans, cloud="west", is_first=False) is None


def test_only_what_was_noted_as_waiting_for_data_is() -> None:
    spans = spans_of(("optimize", 0, 1), ("data", 2, 4), ("forward", 7, 9), ("optimize", 10, 11))
    found = waits_of(spans, cloud="east", is_first=True)
    assert found is not None
    assert (found.for_data, found.saving, found.other, found.for_other_stages) == (0.2, 0.0, 0.4, 0.1)
    assert found.busy == pytest.approx(0.3)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_is_neither_data_nor_activations(is_first: bool) -> None:
    save = Span(track="disk", name="save 1", kind="save", start_s=1, end_s=9)
    spans = [*spans_of(("optimize", 0, 1), ("forward", 9, 10), ("optimize", 10, 11)), save]
    found = waits_of(spans, cloud="east", is_first=is_first)
    assert found is not None
    assert (found.busy, found.saving) == (0.2, 0.8)
    assert (found.for_data, found.for_activations, found.other) == (0.0, 0.0, 0.0)


def test_shares_come_to_one_where_a_rank_reads_while_another_saves() -> None:
    saves = [Span(track="disk", name="save 1", kind="save", start_s=1, end_s=end_s) for end_s in (5, 6)]
    computed = spans_of(("optimize", 0, 1), ("data", 4, 8), ("forward", 9, 10), ("optimize", 10, 11))
    found = waits_of([*computed, *saves], cloud="east", is_first=True)
    assert found is not None
    assert (found.for_data, found.saving, found.other) == pytest.approx((0.4, 0.3, 0.1))
    assert found.for_data + found.saving + found.other == pytest.approx(found.bubble)


def test_a_copy_on_its_way_over_a_line_keeps_nobody_waiting() -> None:
    copy = Span(track="east→west", name="save 1", kind="save", start_s=1, end_s=9)
    spans = [*spans_of(("optimize", 0, 1), ("forward", 9, 10), ("optimize", 10, 11)), copy]
    found = waits_of(spans, cloud="east", is_first=False)
    assert found is not None
    assert (found.saving, found.for_activations) == (0.0, 0.8)


def test_nobody_waits_while_a_run_is_stopped() -> None:
    spans = spans_of(("optimize", 0, 1), ("forward", 2, 3), ("forward", 104, 105), ("optimize", 106, 107))
    found = waits_of(spans, cloud="east", is_first=False, starts_s=(0.0, 103.0))
    assert found is not None
    assert (found.busy, found.for_activations, found.for_other_stages) == (0.6, 0.2, 0.2)
