"""Codecs are steered in a simulated run as in a real one: they follow a line that slows down, and return."""

from itertools import groupby

import pytest

from isthmus.job.codec import parse_codec
from isthmus.job.faults import Fault, FaultKind
from isthmus.plan.codecs import RAW_PAIR, Bounds, Crossing, Cut, Loss, Pair
from isthmus.plan.end_of_step import Note
from isthmus.plan.scenario import HopLoad, Line, Scenario, StageLoad
from isthmus.plan.simulate import Timeline
from isthmus.plan.simulated import simulate_scenario
from isthmus.plan.types import Member

NUM_MICROBATCHES = 16
INTERVAL_S = 0.03
RATE_BPS = 100e6
CROSSING = Crossing(num_rows=256, width=1024)
INT8 = Pair(forward=parse_codec("rotate | int8"), backward=parse_codec("rotate | int8(stochastic)"))


def cut(pair: Pair = INT8, **changes: object) -> Cut:
    values = {"is_free": True, "bandwidths_bps": (RATE_BPS, RATE_BPS), "bounds": Bounds(loss=Loss.SOME)}
    return Cut(crossing=CROSSING, name="a-b", codecs=pair, **{**values, **changes})  # type: ignore[arg-type]


def scenario(num_stages: int = 2) -> Scenario:
    """Stages that take 30 ms for a micro-batch, and lines on which int8 takes 21 ms."""
    line = Line(down_bps=RATE_BPS, up_bps=RATE_BPS, latency_s=0.02)
    load = INT8.forward_bytes(CROSSING), INT8.backward_bytes(CROSSING)
    return Scenario(
        stages=tuple(
            StageLoad(cloud=str(number), forward_s=INTERVAL_S / 3, backward_s=2 * INTERVAL_S / 3)
            for number in range(num_stages)
        ),
        hops=(HopLoad(line=line, forward_bytes=load[0], backward_bytes=load[1]),) * (num_stages - 1),
        num_microbatches=NUM_MICROBATCHES,
    )


def slow_from(at_s: float, duration_s: float, *, factor: float = 10.0) -> Fault:
    return Fault(
        at_s=at_s, kind=FaultKind.SLOW_DOWN, between=("0", "1"), duration_s=duration_s, factor=factor
    )


def sizes(timeline: Timeline, kind: str = "forward", track: str = "0→1") -> list[int]:
    """The bytes of a message in each step, which are the same for all its messages."""
    found: dict[int, set[int]] = {}
    for span in timeline.spans:
        if span.kind == "transfer" and span.track == track and span.name.startswith(kind):
            found.setdefault(int(span.name.split()[1].split(".")[0]), set()).add(span.num_bytes)
    assert all(len(one) == 1 for one in found.values())
    return [found[step].pop() for step in sorted(found)]


def notes(timeline: Timeline) -> list[str]:
    return [one.fact.text for one in timeline.told if isinstance(one.fact, Note)]


def test_a_slow_down_is_followed_within_four_steps_and_left_again_without_flapping() -> None:
    undisturbed = simulate_scenario(scenario(), num_steps=20, cuts=[cut()])
    start_s = undisturbed.steps[-1].end_s
    timeline = simulate_scenario(scenario(), num_steps=80, cuts=[cut()], faults=[slow_from(start_s, 30.0)])
    ends_s = [step.end_s for step in timeline.steps]
    first = next(number for number, end_s in enumerate(ends_s) if end_s > start_s)
    last = next(number for number, end_s in enumerate(ends_s) if end_s > start_s + 30.0)
    forward = sizes(timeline)
    mild = INT8.forward_bytes(CROSSING)
    assert first == 20
    assert set(forward[: first + 1]) == {mild}
    assert forward[first + 5] < mild
    assert set(forward[first + 9 : last]) == {forward[first + 9]}
    assert set(forward[last + 16 :]) == {mild}
    assert len(list(groupby(forward))) <= 6
    changed = next(step for step in range(len(forward)) if forward[step] < mild)
    assert notes(timeline)[0].startswith(f"link a-b, from step {changed + 1} on: activations ")
    assert "int4" in notes(timeline)[0]


def test_gradients_are_sized_by_the_codec_of_their_activation_too() -> None:
    low_rank = Pair(
        forward=parse_codec("subspace(128, anchor=tokens) | int4"), backward=parse_codec("int4(stochastic)")
    )
    timeline = simulate_scenario(scenario(), num_steps=2, cuts=[cut(low_rank, is_free=False)])
    assert set(sizes(timeline)) == {low_rank.forward_bytes(CROSSING)}
    assert set(sizes(timeline, "backward", "1→0")) == {low_rank.backward_bytes(CROSSING)}
    assert timeline.traffic[0].down_bytes == 2 * NUM_MICROBATCHES * low_rank.forward_bytes(CROSSING)


def test_steering_shortens_the_steps_of_a_slow_line() -> None:
    fault = slow_from(0.0, 1e6)
    steered = simulate_scenario(scenario(), num_steps=12, cuts=[cut()], faults=[fault])
    fixed = simulate_scenario(scenario(), num_steps=12, cuts=[cut(is_free=False)], faults=[fault])
    assert steered.steps[-1].duration_s < 0.6 * fixed.steps[-1].duration_s
    assert notes(fixed) == []


def test_only_the_cut_over_the_slow_line_changes() -> None:
    cuts = [cut(), cut()]
    timeline = simulate_scenario(scenario(3), num_steps=12, cuts=cuts, faults=[slow_from(0.0, 1e6)])
    assert sizes(timeline)[-1] < sizes(timeline)[0]
    assert len(set(sizes(timeline, track="1→2"))) == 1


def test_codecs_of_the_scenario_give_its_bytes() -> None:
    without = simulate_scenario(scenario(), num_steps=3)
    with_cuts = simulate_scenario(scenario(), num_steps=3, cuts=[cut(is_free=False)])
    assert with_cuts.steps == without.steps
    assert with_cuts.traffic == without.traffic


def test_a_bottleneck_that_warms_up_crosses_raw() -> None:
    raw = cut(is_free=False, num_warmup_steps=2)
    timeline = simulate_scenario(scenario(), num_steps=4, cuts=[raw])
    mild, whole = INT8.forward_bytes(CROSSING), RAW_PAIR.forward_bytes(CROSSING)
    assert sizes(timeline) == [whole, whole, mild, mild]


def test_who_tells_of_a_change_is_the_first_stage() -> None:
    timeline = simulate_scenario(scenario(), num_steps=12, cuts=[cut()], faults=[slow_from(0.0, 1e6)])
    assert {one.member for one in timeline.told if isinstance(one.fact, Note)} == {Member("0")}
    with pytest.raises(ValueError, match="cuts"):
        simulate_scenario(scenario(), cuts=[cut(), cut()])
