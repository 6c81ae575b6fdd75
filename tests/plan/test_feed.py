"""Generator–discriminator pre-training in the simulator: properties under any delays and crashes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeGuard

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.job import GeneratorDiscriminatorStrategy
from isthmus.job.faults import CloudFault, CloudFaultKind
from isthmus.plan.feed import (
    FACTS,
    Allowance,
    BatchTag,
    DiscriminatorScheduler,
    FeedStep,
    GeneratorDiscriminator,
    GeneratorLost,
    GeneratorScheduler,
    GeneratorStream,
    Merge,
)
from isthmus.plan.feed_plan import FeedForecast, FeedTimes, SimulatedFeed, forecast
from isthmus.plan.scenario import Line
from isthmus.plan.simulate import Timeline, simulate
from isthmus.plan.types import (
    Action,
    Arrived,
    Done,
    Drop,
    Facts,
    Interrupted,
    Lost,
    Member,
    Message,
    MessageKind,
    Outcome,
    Run,
    Save,
    Saved,
    ScheduleError,
    Send,
    Started,
    Stop,
    Tell,
    WorkKind,
)
from tests.plan.recorder import Life, Recorded

modest = settings(max_examples=80)
Batch = tuple[int, int]


def ranks(cloud: str, number: int = 1) -> tuple[Member, ...]:
    return tuple(Member(cloud, rank) for rank in range(number))


def feed(
    *quotas: int, weights: Sequence[float] = (), num_ranks: int = 1, **more: object
) -> GeneratorDiscriminator:
    weights = weights or [1.0] * len(quotas)
    streams = tuple(
        GeneratorStream(members=ranks(f"g{index}", num_ranks), quota=quota, weight=weight)
        for index, (quota, weight) in enumerate(zip(quotas, weights, strict=True))
    )
    bare = GeneratorDiscriminator(discriminator=ranks("d", num_ranks), generators=streams)
    return replace(bare, **more)  # type: ignore[arg-type]


def times(spec: GeneratorDiscriminator, **more: object) -> FeedTimes:
    bare = FeedTimes(generate_s=(0.5,) * len(spec.generators), discriminate_s=0.5, batch_bytes=10_000)
    return replace(bare, **more)  # type: ignore[arg-type]


def line(*, latency_s: float = 0.1, bytes_per_s: float = 1e6) -> Line:
    return Line(down_bps=8 * bytes_per_s, up_bps=8 * bytes_per_s, latency_s=latency_s)


def star(spec: GeneratorDiscriminator, lines: Sequence[Line] = ()) -> dict[tuple[str, str], Line]:
    """A line from the discriminator to each generator."""
    clouds = [stream.members[0].cloud for stream in spec.generators]
    return dict(zip((("d", cloud) for cloud in clouds), lines or [line()] * len(clouds), strict=True))


def gone(cloud: str, at_s: float, duration_s: float = 0.0) -> CloudFault:
    return CloudFault(at_s=at_s, kind=CloudFaultKind.GONE, cloud=cloud, duration_s=duration_s)


def run(
    spec: GeneratorDiscriminator,
    how: FeedTimes | None = None,
    lines: dict[tuple[str, str], Line] | None = None,
    faults: Sequence[CloudFault] = (),
    patience_s: float = 0.0,
) -> tuple[Recorded, Timeline]:
    recorded = Recorded(SimulatedFeed(spec, how or times(spec)))
    timeline = simulate(recorded, lines or star(spec), faults=faults, patience_s=patience_s)
    return recorded, timeline


def history(lives: Sequence[Life]) -> list[Batch]:
    """The batches that are in the weights at the end: a start takes back all steps from its own on."""
    steps: dict[int, list[Batch]] = {}
    for life in lives:
        steps = {step: batches for step, batches in steps.items() if step < life.started.step}
        open_step: list[Batch] = []
        for event, _, _ in life.log:
            match event:
                case Done(work=work) if work.kind is WorkKind.DISCRIMINATE:
                    assert isinstance(work.facts, BatchTag)
                    open_step.append((work.facts.generator, work.facts.number))
                case Done(work=work) if work.kind is WorkKind.UPDATE:
                    assert work.step not in steps
                    steps[work.step], open_step = open_step, []
    return [batch for step in sorted(steps) for batch in steps[step]]


def check_bounds(recorded: Recorded, spec: GeneratorDiscriminator) -> None:
    """No queue and no store of kept batches is ever larger than it may be."""
    for life in recorded.lives[spec.discriminator[0]]:
        check_queues(life, spec)
    for stream in spec.generators:
        for life in recorded.lives[stream.members[0]]:
            check_kept(life, spec)


def check_queues(life: Life, spec: GeneratorDiscriminator) -> None:
    waiting: Counter[int] = Counter()
    for event, _, actions in life.log:
        if isinstance(event, Arrived) and isinstance(event.message.facts, BatchTag):
            waiting[event.message.facts.generator] += Drop(event.message) not in actions
        for action in actions:
            if isinstance(action, Run) and isinstance(action.work.facts, BatchTag):
                waiting[action.work.facts.generator] -= 1
        assert all(0 <= number <= spec.max_queued for number in waiting.values())


def check_kept(life: Life, spec: GeneratorDiscriminator) -> None:
    kept: set[Message] = set()
    for action in life.actions:
        if isinstance(action, Send) and action.keeps:
            kept.add(action.message)
        elif isinstance(action, Drop):
            kept.discard(action.message)
        assert len(kept) <= spec.max_kept


@st.composite
def feeds(draw: st.DrawFn) -> GeneratorDiscriminator:
    number = draw(st.integers(1, 3))
    batches_per_step = draw(st.integers(1, 4))
    max_queued = draw(st.integers(1, 5))
    least = max(2 * batches_per_step, max_queued)
    streams = tuple(
        GeneratorStream(
            members=ranks(f"g{index}", draw(st.integers(1, 2))),
            quota=draw(st.integers(1, 14)),
            weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
            batches_per_step=draw(st.integers(1, 3)),
        )
        for index in range(number)
    )
    return GeneratorDiscriminator(
        discriminator=ranks("d", draw(st.integers(1, 3))),
        generators=streams,
        batches_per_step=batches_per_step,
        max_queued=max_queued,
        max_kept=draw(st.integers(least, least + 10)),
        save_every_s=draw(st.sampled_from([None, 0.0, 3.0])),
        wait_s=1e4,
    )


def clouds_of(spec: GeneratorDiscriminator) -> list[str]:
    return list(dict.fromkeys(member.cloud for member in spec.members))


@st.composite
def lines_of(draw: st.DrawFn, spec: GeneratorDiscriminator) -> dict[tuple[str, str], Line]:
    lines = [
        Line(
            down_bps=draw(st.floats(1e5, 1e8)),
            up_bps=draw(st.floats(1e5, 1e8)),
            latency_s=draw(st.floats(0.0, 0.5)),
            jitter_s=draw(st.sampled_from([0.0, 0.4])),
        )
        for _ in spec.generators
    ]
    return star(spec, lines)


@st.composite
def times_of(draw: st.DrawFn, spec: GeneratorDiscriminator) -> FeedTimes:
    return FeedTimes(
        generate_s=tuple(draw(st.floats(0.05, 2.0)) for _ in spec.generators),
        discriminate_s=draw(st.floats(0.05, 2.0)),
        update_s=draw(st.sampled_from([0.0, 0.3])),
        batch_bytes=10_000,
        state_bytes=draw(st.sampled_from([0, 200_000])),
    )


@st.composite
def crashes(draw: st.DrawFn, spec: GeneratorDiscriminator) -> list[CloudFault]:
    """Any cloud, at any time, for longer than a message is under way."""
    clouds = st.sampled_from(clouds_of(spec))
    fault = st.builds(gone, clouds, st.floats(0.0, 40.0), st.floats(1.0, 15.0))
    return draw(st.lists(fault, min_size=1, max_size=6))


# The merge.


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 60))
def test_every_prefix_of_the_merge_keeps_to_the_weights(weights: list[int], number: int) -> None:
    merge, streams = Merge(weights), range(len(weights))
    taken = Counter[int]()
    for count in range(1, number + 1):
        one = merge.choose(streams)
        merge.take(one, streams)
        taken[one] += 1
        for stream, weight in enumerate(weights):
            assert abs(taken[stream] - count * weight / sum(weights)) < len(weights)


def test_the_merge_of_the_docs() -> None:
    merge = Merge([3.0, 1.0])
    order = ""
    for _ in range(8):
        one = merge.choose([0, 1])
        merge.take(one, [0, 1])
        order += "ab"[one]
    assert order == "aabaaaba"


@modest
@given(st.data())
def test_the_merge_does_not_depend_on_when_batches_arrive(data: st.DataObject) -> None:
    spec = data.draw(feeds())
    at_once = {pair: line(latency_s=0.0, bytes_per_s=1e12) for pair in star(spec)}
    plain, _ = run(spec, times(spec), at_once)
    other, _ = run(spec, data.draw(times_of(spec)), data.draw(lines_of(spec)))
    discriminator = spec.discriminator[0]
    assert history(plain.lives[discriminator]) == history(other.lives[discriminator])


# What holds for every run.


@modest
@given(st.data())
def test_quotas_end_the_run_within_all_bounds(data: st.DataObject) -> None:
    spec = data.draw(feeds())
    recorded, timeline = run(spec, data.draw(times_of(spec)), data.draw(lines_of(spec)))
    assert all(recorded.outcome(member) is Outcome.FINISHED for member in spec.members)
    assert timeline.stopped is None
    batches = history(recorded.lives[spec.discriminator[0]])
    for index, stream in enumerate(spec.generators):
        assert [number for one, number in batches if one == index] == list(range(stream.quota))
    check_bounds(recorded, spec)
    recorded.check(FACTS)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_after_crashes_every_batch_is_in_the_weights_once_and_in_the_same_order(data: st.DataObject) -> None:
    spec = data.draw(feeds())
    plain, _ = run(spec)
    recorded, _ = run(
        spec,
        data.draw(times_of(spec)),
        data.draw(lines_of(spec)),
        data.draw(crashes(spec)),
        data.draw(st.sampled_from([0.0, 2.0])),
    )
    discriminator = spec.discriminator[0]
    assert recorded.outcome(discriminator) is Outcome.FINISHED
    assert not any(recorded.outcome(member) is Outcome.FAILED for member in spec.members)
    assert history(recorded.lives[discriminator]) == history(plain.lives[discriminator])
    check_bounds(recorded, spec)
    recorded.check(FACTS)


@modest
@given(st.data())
def test_with_continue_no_batch_is_trained_on_twice_and_only_those_of_lost_generators_are_missing(
    data: st.DataObject,
) -> None:
    spec = replace(data.draw(feeds()), on_lost="continue", wait_s=60.0)
    faults = data.draw(crashes(spec))
    for_good = data.draw(st.sets(st.sampled_from(range(len(spec.generators))), max_size=1))
    faults += [gone(f"g{index}", data.draw(st.floats(0.0, 20.0))) for index in for_good]
    recorded, _ = run(spec, data.draw(times_of(spec)), data.draw(lines_of(spec)), faults)
    discriminator = spec.discriminator[0]
    batches = history(recorded.lives[discriminator])
    taken = [[number for one, number in batches if one == index] for index in range(len(spec.generators))]
    is_met = [len(own) == one.quota for own, one in zip(taken, spec.generators, strict=True)]
    assert all(numbers == list(range(len(numbers))) for numbers in taken)
    assert all(met or index in for_good for index, met in enumerate(is_met))
    assert recorded.outcome(discriminator) is (Outcome.FINISHED if any(is_met) else Outcome.FAILED)
    check_bounds(recorded, spec)


# Speed.


def told(timeline: Timeline) -> list[FeedStep]:
    return [one.fact for one in timeline.told if isinstance(one.fact, FeedStep)]


def test_a_discriminator_whose_generators_are_fast_enough_does_not_wait() -> None:
    """20 Mbit/s and 100 ms, two generators that together make 10 % more than is taken."""
    spec = feed(400, 400, batches_per_step=4, max_queued=8, save_every_s=20.0)
    how = times(spec, generate_s=(0.18, 0.18), discriminate_s=0.1, batch_bytes=60_000)
    wan = Line(down_bps=20e6, up_bps=20e6, latency_s=0.1)
    _, timeline = run(spec, how, star(spec, [wan, wan]))
    steps = told(timeline)[10:]
    assert sum(one.waited_s for one in steps) < 0.02 * sum(one.duration_s for one in timeline.steps[10:])
    assert timeline.step_s == pytest.approx(0.4, rel=0.02)


def test_slow_generators_are_told_as_waiting() -> None:
    spec = feed(40, batches_per_step=4)
    _, timeline = run(spec, times(spec, generate_s=(1.0,), discriminate_s=0.25))
    waited_s = [one.waited_s for one in told(timeline)[1:]]
    assert waited_s == pytest.approx([3.0] * len(waited_s), abs=0.01)


def test_queues_and_staleness_are_told() -> None:
    """A generator that is four times as fast fills its queue, and batches age in it."""
    spec = feed(60, max_queued=6)
    _, timeline = run(spec, times(spec, generate_s=(0.1,), discriminate_s=0.4))
    steady = told(timeline)[20:40]
    assert {one.num_queued for one in steady} <= {(4,), (5,), (6,)}
    assert {one.staleness for one in steady} <= {(4,), (5,), (6,)}


# Losses, one by one.


def test_a_generator_that_does_not_return_fails_the_run_with_its_name() -> None:
    spec = feed(20, 20, wait_s=30.0)
    recorded, _ = run(spec, faults=[gone("g1", 5.0)])
    assert recorded.outcome(Member("d")) is Outcome.FAILED
    assert recorded.outcome(Member("g0")) is Outcome.FAILED
    stop = list(recorded.lives[Member("d")][0].actions)[-1]
    assert "'g1'" in str(stop)
    assert "continue" in str(stop)


def test_with_continue_the_others_go_on_at_once_and_the_loss_is_told() -> None:
    spec = feed(30, 30, on_lost="continue", wait_s=5.0)
    recorded, timeline = run(spec, faults=[gone("g1", 5.0)])
    discriminator = recorded.lives[Member("d")][0]
    assert recorded.outcome(Member("d")) is recorded.outcome(Member("g0")) is Outcome.FINISHED
    (loss,) = [
        one for one in discriminator.actions if isinstance(one, Tell) and isinstance(one.fact, GeneratorLost)
    ]
    batches = history([discriminator])
    assert Counter(one for one, _ in batches) == {0: 30, 1: loss.fact.next}  # type: ignore[attr-defined]
    ends_s = [step.end_s for step in timeline.steps if 5.0 < step.end_s < 12.0]
    assert all(after - before < 1.0 for before, after in pairwise(ends_s))


def test_with_continue_nobody_waits_until_a_silent_generator_is_given_up() -> None:
    spec = feed(30, 30, on_lost="continue", wait_s=5.0)
    recorded, timeline = run(spec, faults=[gone("g1", 5.0)], patience_s=30.0)
    assert recorded.outcome(Member("d")) is Outcome.FINISHED
    ends_s = [step.end_s for step in timeline.steps if step.end_s < 20.0]
    assert all(after - before < 1.0 for before, after in pairwise(ends_s))
    assert Counter(one for one, _ in history(recorded.lives[Member("d")]))[0] == 30


def test_a_silent_generator_that_answers_again_takes_its_turns_again() -> None:
    spec = feed(9, 9, max_queued=3, on_lost="continue")
    scheduler = DiscriminatorScheduler(spec)
    scheduler.on(Started(0), 0.0)
    scheduler.on(Lost(Member("g0"), final=False), 0.0)
    (first,) = (one for one in scheduler.on(batch(0, generator=1, sender="g1"), 1.0) if isinstance(one, Run))
    scheduler.on(batch(0), 2.0)
    to_end = scheduler.on(Done(first.work), 3.0)
    while not any(isinstance(one, Run) and one.work.kind is WorkKind.DISCRIMINATE for one in to_end):
        (ran,) = (one for one in to_end if isinstance(one, Run))
        to_end = scheduler.on(Done(ran.work), 4.0)
    (ran,) = (one for one in to_end if isinstance(one, Run))
    assert isinstance(ran.work.facts, BatchTag)
    assert ran.work.facts.generator == 0


def test_a_run_whose_generators_are_all_lost_fails() -> None:
    spec = feed(20, 20, on_lost="continue", wait_s=3.0)
    recorded, _ = run(spec, faults=[gone("g0", 4.0), gone("g1", 5.0)])
    assert recorded.outcome(Member("d")) is Outcome.FAILED
    stop = list(recorded.lives[Member("d")][0].actions)[-1]
    assert "'g0', 'g1'" in str(stop)


def test_a_generator_that_returns_takes_its_turns_again() -> None:
    spec = feed(30, 30, on_lost="continue", wait_s=100.0, save_every_s=1.0)
    recorded, _ = run(spec, faults=[gone("g1", 5.0, 4.0)])
    assert recorded.outcome(Member("d")) is Outcome.FINISHED
    assert Counter(one for one, _ in history(recorded.lives[Member("d")])) == {0: 30, 1: 30}


def test_a_discriminator_that_returns_gets_again_only_what_is_not_covered() -> None:
    spec = feed(60, save_every_s=5.0)
    recorded, _ = run(spec, faults=[gone("d", 20.0, 3.0)])
    first, second = recorded.lives[Member("d")]
    assert 0 < second.started.step < len(history([first]))
    arrived = [event.message.item for event in second.events if isinstance(event, Arrived)]
    assert arrived == list(range(second.started.step, 60))


def test_a_generator_that_returns_makes_its_batches_again_from_its_save() -> None:
    spec = feed(60, save_every_s=5.0)
    recorded, _ = run(spec, faults=[gone("g0", 18.0, 3.0)])
    _, second = recorded.lives[Member("g0")]
    made = [
        event.work.item
        for event in second.events
        if isinstance(event, Done) and event.work.kind is WorkKind.GENERATE
    ]
    assert made == list(range(second.started.step, 60))
    (discriminator,) = recorded.lives[Member("d")]
    assert any(isinstance(action, Drop) for action in discriminator.actions)


# What cannot be.


def batch(number: int, *, generator: int = 0, sender: str = "g0") -> Arrived:
    tag = BatchTag(generator=generator, number=number, version=0, num_tokens=1)
    return Arrived(Message(MessageKind.IDS, 0, number, Member(sender), (Member("d"),), tag))


def lost(event: Arrived, **more: Any) -> tuple[DiscriminatorScheduler, tuple[Action, ...]]:
    """A discriminator of two generators after an event, and what it answers."""
    scheduler = DiscriminatorScheduler(feed(9, 9, max_queued=3, **more))
    scheduler.on(Started(0), 0.0)
    return scheduler, scheduler.on(event, 0.0)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(batch(1), id="a batch is left out"),
        pytest.param(batch(0, generator=1), id="a batch of another generator"),
        pytest.param(batch(0, generator=7), id="a generator that is none"),
    ],
)
def test_a_batch_that_may_not_be_sent_ends_its_generator_alone(event: Arrived) -> None:
    scheduler, actions = lost(event, on_lost="continue")
    assert Drop(event.message) in actions
    assert [one.fact.generator for one in actions if isinstance(one, Tell) and is_lost(one.fact)] == [0]
    assert Drop(batch(0).message) in scheduler.on(batch(0), 1.0)
    ran = scheduler.on(batch(0, sender="g1", generator=1), 2.0)
    assert [one.work.kind for one in ran if isinstance(one, Run)] == [WorkKind.DISCRIMINATE]


def is_lost(fact: Facts) -> TypeGuard[GeneratorLost]:
    return isinstance(fact, GeneratorLost)


def test_a_generator_that_is_waited_for_and_breaks_the_protocol_fails_the_run() -> None:
    _, actions = lost(batch(1))
    (stop,) = (one for one in actions if isinstance(one, Stop))
    assert stop.outcome is Outcome.FAILED
    assert "g0" in stop.reason
    assert stop.hint


@pytest.mark.parametrize("kind", [MessageKind.CREDIT, MessageKind.IDS])
def test_a_discriminator_awaits_tagged_batches_alone(kind: MessageKind) -> None:
    with pytest.raises(ScheduleError):
        lost(Arrived(Message(kind, 0, 0, Member("g0"), (Member("d"),))))


def test_a_generator_that_floods_is_refused() -> None:
    scheduler = DiscriminatorScheduler(feed(99, 99, max_queued=3, on_lost="continue"))
    scheduler.on(Started(0), 0.0)
    actions = [one for number in range(40) for one in scheduler.on(batch(number), 0.0)]
    # One runs and three wait.
    assert [one.message.item for one in actions if isinstance(one, Drop)] == list(range(4, 40))
    assert sum(isinstance(one, Tell) and is_lost(one.fact) for one in actions) == 1


def test_a_generator_takes_credit_from_the_discriminator_alone() -> None:
    scheduler = GeneratorScheduler(feed(9, 9), 0)
    scheduler.on(Started(0), 0.0)
    credit = Message(MessageKind.CREDIT, 0, 8, Member("g1"), (Member("g0"),), Allowance(next=0, limit=8))
    with pytest.raises(ScheduleError):
        scheduler.on(Arrived(credit), 0.0)


@pytest.mark.parametrize(
    "change", [{"max_queued": 0}, {"max_kept": 1}, {"max_kept": 10**6}, {"generators": ()}]
)
def test_what_cannot_work_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"queue|generator|max_kept"):
        replace(feed(9), **change)


# Orderly stops.


@pytest.mark.parametrize("batches_per_step", [1, 3])
def test_clouds_that_are_interrupted_save_and_the_run_goes_on_from_there(batches_per_step: int) -> None:
    spec = feed(12, 7, batches_per_step=batches_per_step, max_queued=4)
    recorded, _ = run(spec)
    leader = spec.discriminator[0]
    (life,) = recorded.lives[leader]
    middle = next(
        index
        for index, (event, _, _) in enumerate(life.log)
        if isinstance(event, Done) and event.work.kind is WorkKind.UPDATE and event.work.step == 2
    )
    scheduler = DiscriminatorScheduler(spec)
    for event, now_s, _ in life.log[:middle]:
        scheduler.on(event, now_s)
    scheduler.on(Interrupted("SIGTERM"), 9.0)
    (save,) = (one for one in scheduler.on(life.log[middle][0], 9.0) if isinstance(one, Save))
    assert save.step == 3
    (stop,) = (one for one in scheduler.on(Saved(3), 9.5) if isinstance(one, Stop))
    assert (stop.outcome, stop.step) == (Outcome.INTERRUPTED, 3)
    again = DiscriminatorScheduler(spec)
    told = [one.message.facts for one in again.on(Started(3, save.facts), 0.0) if isinstance(one, Send)]
    assert sum(one.next for one in told if isinstance(one, Allowance)) == 3 * batches_per_step


def test_a_discriminator_that_waits_within_a_step_stops_with_what_it_saved_last() -> None:
    scheduler = DiscriminatorScheduler(feed(9, 9, batches_per_step=2))
    scheduler.on(Started(0), 0.0)
    (ran,) = (one for one in scheduler.on(batch(0), 0.0) if isinstance(one, Run))
    scheduler.on(Done(ran.work), 1.0)
    (stop,) = (one for one in scheduler.on(Interrupted("SIGTERM"), 2.0) if isinstance(one, Stop))
    assert (stop.outcome, stop.step) == (Outcome.INTERRUPTED, 0)


def test_a_generator_that_waits_for_credit_saves_and_stops() -> None:
    scheduler = GeneratorScheduler(feed(9, 9), 0)
    scheduler.on(Started(0), 0.0)
    asked = scheduler.on(Interrupted("SIGTERM"), 1.0)
    (save,) = (one for one in asked if isinstance(one, Save))
    assert [type(one) for one in scheduler.on(Saved(save.step), 2.0)] == [Stop]
    (told,) = (one.message for one in asked if isinstance(one, Send))
    judge = DiscriminatorScheduler(feed(9, 9))
    judge.on(Started(0), 0.0)
    passed_on = [one.message for one in judge.on(Arrived(told), 2.0) if isinstance(one, Send)]
    assert [one.to for one in passed_on] == [(Member("g0"),), (Member("g1"),)]
    other = GeneratorScheduler(feed(9, 9), 1)
    other.on(Started(0), 0.0)
    assert any(isinstance(one, Save) for one in other.on(Arrived(passed_on[1]), 3.0))


# What the planner takes from it.


def judged(generate_s: float, discriminate_s: float, batch_bytes: int, *, mbps: float = 20.0) -> FeedForecast:
    strategy = GeneratorDiscriminatorStrategy(kind="generator-discriminator")
    forecast_times = FeedTimes(
        generate_s=(generate_s, generate_s), discriminate_s=discriminate_s, batch_bytes=batch_bytes
    )
    thin = Line(down_bps=mbps * 1e6, up_bps=mbps * 1e6, latency_s=0.05)
    return forecast(strategy, ("d", "a", "b"), forecast_times, {("d", "a"): thin, ("d", "b"): thin})


@pytest.mark.parametrize(
    ("generate_s", "discriminate_s", "batch_bytes", "step_s", "ratio"),
    [
        pytest.param(0.1, 0.5, 10_000, 0.5, 1.0, id="the discriminator limits"),
        pytest.param(1.0, 0.2, 10_000, 0.5, 1.0, id="two generators limit"),
        pytest.param(0.1, 0.2, 5_000_000, 1.0, 0.2, id="two lines limit"),
    ],
)
def test_a_forecast_is_that_of_the_slowest(
    generate_s: float, discriminate_s: float, batch_bytes: int, step_s: float, ratio: float
) -> None:
    found = judged(generate_s, discriminate_s, batch_bytes)
    assert found.step_s == pytest.approx(step_s, rel=0.02)
    assert found.throughput_ratio == pytest.approx(ratio, rel=0.05)
    assert found.waited_s == pytest.approx(step_s - discriminate_s, abs=0.02)
