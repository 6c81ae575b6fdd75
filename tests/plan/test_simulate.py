"""The simulator against published bubbles, cases solved by hand, and what must hold for any pipeline."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.job.faults import CloudFault, CloudFaultKind, Fault, FaultKind
from isthmus.plan.plan import scenario_of
from isthmus.plan.scenario import Hop, Policy, Scenario, scenario_to_dict, windows
from isthmus.plan.simulate import Timeline
from isthmus.plan.simulated import Checkpointing, simulate_scenario
from tests.plan.scenarios import hop, pipeline, scenarios, stage

modest = settings(deadline=None, max_examples=60)
DOCS = Path(__file__).parent.parent.parent / "docs" / "simulator.md"
BETWEEN = ("cloud0", "cloud1")


def times_of(timeline: Timeline, kind: str, *, track: str | None = None) -> list[tuple[float, float]]:
    return [
        (span.start_s, span.end_s)
        for span in timeline.spans
        if span.kind == kind and track in (None, span.track)
    ]


# Figures that others have published.


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "serialise_s", "latency_s", "plain", "wan", "in_flight"),
    [
        (2, 16, 0.3, 3, 0.538, 0.167, 5),
        (2, 64, 1.5, 6, 0.716, 0.086, 7),
        (4, 128, 2, 10, 0.860, 0.174, 28),
        (2, 16, 0.5, 0.5, 0.284, 0.094, 3),
    ],
)
def test_published_bubbles_come_out(
    num_stages: int,
    num_microbatches: int,
    serialise_s: float,
    latency_s: float,
    plain: float,
    wan: float,
    in_flight: int,
) -> None:
    scenario = pipeline(num_stages, num_microbatches, serialise_s=serialise_s, latency_s=latency_s)
    hops = [Hop(forward_s=serialise_s, backward_s=serialise_s, latency_s=latency_s)] * (num_stages - 1)
    chosen = windows(scenario, hops, interval_s=3.0)
    assert chosen[0] == in_flight
    assert simulate_scenario(replace(scenario, windows=chosen)).bubble == pytest.approx(wan, abs=0.001)
    assert simulate_scenario(replace(scenario, policy=Policy.ONE_F_ONE_B)).bubble == pytest.approx(
        plain, abs=0.001
    )


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "serialise_s", "latency_s", "wan"),
    [(2, 16, 0.3, 3, 0.167), (2, 64, 1.5, 6, 0.086), (4, 128, 2, 10, 0.174)],
)
def test_measured_windows_are_as_good_from_the_second_step_on(
    num_stages: int, num_microbatches: int, serialise_s: float, latency_s: float, wan: float
) -> None:
    scenario = pipeline(num_stages, num_microbatches, serialise_s=serialise_s, latency_s=latency_s)
    first, *others = simulate_scenario(scenario, num_steps=3).steps
    assert first.bubble > 2 * wan
    assert [step.bubble for step in others] == pytest.approx([wan] * 2, abs=0.001)


@modest
@given(p=st.integers(1, 5), m=st.integers(1, 12), policy=st.sampled_from(list(Policy)))
def test_without_communication_every_policy_leaves_the_classic_bubble(p: int, m: int, policy: Policy) -> None:
    assert simulate_scenario(pipeline(p, m, policy=policy)).bubble == pytest.approx((p - 1) / (m + p - 1))


# Cases solved by hand: a message takes half a second on the line and arrives a second later.


def test_gpipe_of_two_stages_and_two_microbatches() -> None:
    timeline = simulate_scenario(pipeline(2, 2, serialise_s=0.5, latency_s=1.0, policy=Policy.GPIPE))
    assert times_of(timeline, "forward", track="cloud0") == [(0, 1), (1, 2)]
    assert times_of(timeline, "transfer", track="cloud0→cloud1") == [(1, 2.5), (2, 3.5)]
    assert times_of(timeline, "forward", track="cloud1") == [(2.5, 3.5), (3.5, 4.5)]
    assert times_of(timeline, "backward", track="cloud1") == [(4.5, 6.5), (6.5, 8.5)]
    assert times_of(timeline, "transfer", track="cloud1→cloud0") == [(6.5, 8), (8.5, 10)]
    assert times_of(timeline, "backward", track="cloud0") == [(8, 10), (10, 12)]
    assert timeline.step_s == 12
    assert timeline.steps[0].bubbles == (0.5, 0.5)


def test_1f1b_of_two_stages_and_two_microbatches() -> None:
    timeline = simulate_scenario(pipeline(2, 2, serialise_s=0.5, latency_s=1.0, policy=Policy.ONE_F_ONE_B))
    assert times_of(timeline, "forward", track="cloud1") == [(2.5, 3.5), (5.5, 6.5)]
    assert times_of(timeline, "backward", track="cloud1") == [(3.5, 5.5), (6.5, 8.5)]
    assert times_of(timeline, "backward", track="cloud0") == [(7, 9), (10, 12)]


def test_wan_1f1b_of_unequal_stages_with_a_window_that_binds() -> None:
    scenario = Scenario(
        stages=(stage(0), stage(1, 2.0, 3.0)), hops=(hop(0.5, 1.0),), num_microbatches=3, windows=(2, 1)
    )
    timeline = simulate_scenario(scenario)
    assert times_of(timeline, "forward", track="cloud0") == [(0, 1), (1, 2), (11, 12)]
    assert times_of(timeline, "backward", track="cloud0") == [(9, 11), (14, 16), (20, 22)]
    assert times_of(timeline, "forward", track="cloud1") == [(2.5, 4.5), (7.5, 9.5), (13.5, 15.5)]
    assert times_of(timeline, "backward", track="cloud1") == [(4.5, 7.5), (9.5, 12.5), (15.5, 18.5)]


def test_two_pairs_of_ranks_share_their_line() -> None:
    scenario = Scenario(
        stages=(stage(0, 1.0, 1.0, num_ranks=2), stage(1, 1.0, 1.0, num_ranks=2)),
        hops=(hop(1.0, 0.5),),
        num_microbatches=2,
    )
    timeline = simulate_scenario(scenario)
    assert times_of(timeline, "transfer", track="cloud0→cloud1") == [(1, 3.5)] * 2
    assert times_of(timeline, "transfer", track="cloud1→cloud0") == [(5.5, 8)] * 2
    assert times_of(timeline, "backward", track="cloud0/1") == [(8, 9)]
    assert timeline.step_s == 9


def test_coding_delays_messages_one_after_the_other_and_no_pass() -> None:
    scenario = replace(pipeline(2, 2, policy=Policy.GPIPE), hops=(hop(0.0, 1.0, coding_s=2.0),))
    timeline = simulate_scenario(scenario)
    assert times_of(timeline, "encode", track="cloud0→cloud1") == [(1, 3), (3, 5)]
    assert times_of(timeline, "forward", track="cloud1") == [(4, 5), (6, 7)]


def test_handling_delays_each_message_and_word_by_itself() -> None:
    plain = pipeline(2, 2, serialise_s=0.5, latency_s=1.0, policy=Policy.GPIPE)
    slow = replace(plain.hops[0], line=replace(plain.hops[0].line, handling_s=0.25))
    timeline = simulate_scenario(replace(plain, hops=(slow,)))
    assert times_of(timeline, "transfer", track="cloud0→cloud1") == [(1, 2.75), (2, 3.75)]
    assert times_of(timeline, "optimize", track="cloud1") == [(13.75, 13.75)]


def test_windows_count_handling_and_coding_as_workers_do() -> None:
    def sizes(handling_s: float, coding_s: float) -> tuple[int, ...]:
        one = hop(0.5, 1.0, coding_s=coding_s)
        line = replace(one.line, handling_s=handling_s)
        scenario = replace(pipeline(2, 16), hops=(replace(one, line=line),))
        return simulate_scenario(scenario, num_steps=2).steps[-1].windows

    assert sizes(0.0, 0.0) == (4, 1)
    assert sizes(1.0, 0.0) == sizes(0.0, 1.0) == (5, 1)


@pytest.mark.parametrize(("update_s", "ends_s"), [(1.0, (9.25, 18.5)), (3.0, (9.25, 19.75))])
def test_a_step_ends_with_a_verdict_and_an_update_that_may_delay_the_next(
    update_s: float, ends_s: tuple[float, float]
) -> None:
    scenario = Scenario(
        stages=(stage(0, update_s=0.25), stage(1, update_s=update_s)),
        hops=(hop(0.5, 1.0),),
        num_microbatches=1,
    )
    timeline = simulate_scenario(scenario, num_steps=2)
    assert times_of(timeline, "optimize", track="cloud1")[0] == (10.0, 10.0 + update_s)
    assert tuple(step.end_s for step in timeline.steps) == ends_s


# What holds for any pipeline.


def critical_path_s(scenario: Scenario) -> float:
    """No run is shorter than the busiest rank or line, with the way of a micro-batch there and back."""
    fill_s, bounds_s = 0.0, [0.0]
    for index, load in enumerate(scenario.stages):
        has_backward = index >= scenario.first_trained
        pass_s = load.forward_s + (load.backward_s if has_backward else 0.0)
        bounds_s.append(fill_s + math.ceil(scenario.num_microbatches / load.num_ranks) * pass_s)
        if index == len(scenario.hops):
            break
        one = scenario.hops[index]
        forward_s = one.forward_bytes * 8 / one.line.down_bps
        backward_s = one.backward_bytes * 8 / one.line.up_bps if has_backward else 0.0
        there_s = load.forward_s + one.forward_coding_s + one.line.latency_s
        back_s = load.backward_s + one.backward_coding_s + one.line.latency_s if has_backward else 0.0
        bounds_s.append(fill_s + there_s + scenario.num_microbatches * max(forward_s, backward_s))
        fill_s += there_s + forward_s + back_s + backward_s
    return max(bounds_s)


@modest
@given(scenarios(), st.integers(0, 3))
def test_no_run_is_shorter_than_its_critical_path(scenario: Scenario, seed: int) -> None:
    timeline = simulate_scenario(scenario, seed=seed)
    last_s = max(span.end_s for span in timeline.spans)
    assert last_s >= critical_path_s(scenario) * (1 - 1e-9)


@modest
@given(scenarios(), st.integers(0, 3))
def test_the_seed_decides_everything(scenario: Scenario, seed: int) -> None:
    assert simulate_scenario(scenario, num_steps=2, seed=seed) == simulate_scenario(
        scenario, num_steps=2, seed=seed
    )


def test_another_seed_is_another_run() -> None:
    scenario = replace(pipeline(2, 4), hops=(hop(0.5, 1.0, jitter_s=1.0),))
    assert simulate_scenario(scenario, seed=1).spans != simulate_scenario(scenario, seed=2).spans


@modest
@given(scenarios())
def test_every_byte_and_every_pass_is_there_once(scenario: Scenario) -> None:
    timeline = simulate_scenario(scenario, num_steps=2)
    num_passes = 2 * scenario.num_microbatches
    for index, (one, traffic) in enumerate(zip(scenario.hops, timeline.traffic, strict=True)):
        up_bytes = one.backward_bytes if index >= scenario.first_trained else 0
        assert traffic.down_bytes == num_passes * one.forward_bytes
        assert traffic.up_bytes == num_passes * up_bytes
    crossed = sum(span.num_bytes for span in timeline.spans if span.kind == "transfer")
    assert crossed == sum(one.down_bytes + one.up_bytes for one in timeline.traffic)
    names = Counter((span.track.split("/")[0], span.name) for span in timeline.spans)
    for index, load in enumerate(scenario.stages):
        for step in range(2):
            assert names[load.cloud, f"forward {step}.0"] >= 1
            assert (names[load.cloud, f"backward {step}.0"] >= 1) == (index >= scenario.first_trained)
            assert names[load.cloud, f"optimize {step}"] == load.num_ranks


@modest
@given(scenarios())
def test_a_rank_computes_one_thing_at_a_time(scenario: Scenario) -> None:
    timeline = simulate_scenario(scenario, num_steps=2)
    free_s: dict[str, float] = {}
    for span in sorted(timeline.spans, key=lambda one: (one.start_s, one.end_s)):
        if span.kind in ("forward", "backward", "optimize"):
            assert span.start_s >= free_s.get(span.track, 0.0)
            free_s[span.track] = span.end_s


def test_windows_that_cannot_work_are_refused() -> None:
    scenario = pipeline(2, 4, policy=Policy.GPIPE, windows=(1, 4))
    with pytest.raises(ValueError, match="wait for each other"):
        simulate_scenario(scenario)


def read_back(values: dict[str, object]) -> Scenario | None:
    return scenario_of(json.dumps({"version": 1, "scenario": values}))


@given(scenarios())
def test_a_scenario_is_the_same_after_plan_json(scenario: Scenario) -> None:
    assert read_back(scenario_to_dict(scenario)) == scenario


@pytest.mark.parametrize("change", [{"stages": 3}, {"policy": "none"}, {"hops": [{}]}, {"hops": []}])
def test_what_is_no_scenario_is_said_in_one_sentence(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="scenario") as raised:
        read_back({**scenario_to_dict(pipeline(2, 2)), **change})
    assert raised.value.hint


# Faults, on the GPipe case above, whose transfers are from 1 to 3.5 and from 6.5 to 10.

HAND = pipeline(2, 2, serialise_s=0.5, latency_s=1.0, policy=Policy.GPIPE)


def on_line(kind: FaultKind, at_s: float, duration_s: float, factor: float = 1.0) -> Fault:
    return Fault(at_s=at_s, kind=kind, between=BETWEEN, duration_s=duration_s, factor=factor)


@pytest.mark.parametrize(
    ("fault", "step_s"),
    [
        (on_line(FaultKind.BLACKHOLE, 2.0, 5.0), 17.0),
        (on_line(FaultKind.CUT, 2.0, 5.0), 23.5),
        (on_line(FaultKind.SLOW_DOWN, 1.0, 100.0, factor=2.0), 13.0),
        (on_line(FaultKind.BLACKHOLE, 50.0, 5.0), 12.0),
        (CloudFault(at_s=0.0, kind=CloudFaultKind.SLOW, cloud="cloud1", duration_s=5.5, factor=2.0), 13.5),
        (CloudFault(at_s=3.0, kind=CloudFaultKind.SLOW, cloud="cloud9", duration_s=5.5, factor=2.0), 12.0),
        (CloudFault(at_s=12.5, kind=CloudFaultKind.GONE, cloud="cloud1"), 12.0),
    ],
)
def test_a_fault_costs_what_it_costs_by_hand(fault: Fault | CloudFault, step_s: float) -> None:
    timeline = simulate_scenario(HAND, faults=[fault])
    assert timeline.step_s == step_s
    assert timeline.stopped is None


def test_a_cloud_that_is_gone_ends_the_run_and_loses_what_was_not_saved() -> None:
    gone = CloudFault(at_s=40.0, kind=CloudFaultKind.GONE, cloud="cloud1")
    timeline = simulate_scenario(HAND, num_steps=9, faults=[gone])
    assert len(timeline.steps) == 3
    assert max(span.end_s for span in timeline.spans) <= 40.0
    assert timeline.stopped is not None
    assert (timeline.stopped.step, timeline.stopped.safe_step, timeline.stopped.lost_s) == (3, 0, 40.0)


def test_a_run_that_ends_in_its_first_step_has_no_step_time() -> None:
    gone = CloudFault(at_s=1.0, kind=CloudFaultKind.GONE, cloud="cloud0")
    timeline = simulate_scenario(HAND, faults=[gone])
    assert not timeline.steps
    assert math.isnan(timeline.step_s)


def test_a_copy_at_another_cloud_bounds_what_is_lost() -> None:
    gone = CloudFault(at_s=40.0, kind=CloudFaultKind.GONE, cloud="cloud1")
    saving = Checkpointing(every_s=20.0, stage_bytes=(1_000_000, 2_000_000))
    timeline = simulate_scenario(HAND, num_steps=9, faults=[gone], checkpoint=saving)
    assert timeline.stopped is not None
    assert (timeline.stopped.safe_step, timeline.stopped.lost_s) == (2, 40.0 - timeline.steps[1].end_s)
    assert timeline.traffic[0].checkpoint_bytes == 3_000_000
    assert sorted((span.track, span.name) for span in timeline.spans if span.kind == "save") == [
        ("cloud0→cloud1", "save 2"),
        ("cloud1→cloud0", "save 2"),
    ]


def test_copies_take_their_share_of_the_line() -> None:
    saving = Checkpointing(every_s=0.0, stage_bytes=(10_000_000, 10_000_000), share=0.5)
    slowed, plain = (
        simulate_scenario(HAND, num_steps=2, checkpoint=saving),
        simulate_scenario(HAND, num_steps=2),
    )
    assert slowed.steps[0] == plain.steps[0]
    assert slowed.steps[1].duration_s == plain.steps[1].duration_s + 1.0


def test_windows_follow_what_is_measured() -> None:
    """A line that becomes slow makes the windows of the next step larger, and it ends no later for it."""
    scenario = pipeline(2, 32, serialise_s=0.3, latency_s=1.0)
    slow = on_line(FaultKind.SLOW_DOWN, 150.0, 1e6, factor=8.0)
    steps = simulate_scenario(scenario, num_steps=5, faults=[slow]).steps
    assert steps[1].windows < steps[-1].windows
    assert steps[-1].duration_s <= steps[-2].duration_s


def test_the_example_of_the_docs_gives_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {})
    step_s, *_ = capsys.readouterr().out.split()
    assert float(step_s) == pytest.approx(1.04, abs=0.005)
