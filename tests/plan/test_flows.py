"""Lines that are shared, slowed, cut and filled up, against cases solved by hand and a slow reference."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.lines import Clock, Flow, Pace, Slowdown
from isthmus.plan.scenario import Line


@dataclass
class Traffic:
    """A line of a byte a second, and when each message was sent and had arrived."""

    clock: Clock = field(default_factory=Clock)
    sent_s: dict[str, float] = field(default_factory=dict)
    arrived_s: dict[str, float] = field(default_factory=dict)

    def flow(
        self,
        *,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        seed: str = "",
        slowdowns: tuple[Slowdown, ...] = (),
        share: float = 0.0,
    ) -> Flow:
        line = Line(down_bps=8.0, up_bps=8.0, latency_s=latency_s, jitter_s=jitter_s)
        return Flow(self.clock, line, line.down_bps, seed=seed, slowdowns=slowdowns, share=share)

    def send(self, flow: Flow, at_s: float, stream: str, name: str, num_bytes: int) -> None:
        def sent() -> None:
            self.sent_s[name] = self.clock.now_s

        def arrived() -> None:
            self.arrived_s[name] = self.clock.now_s

        self.clock.at(at_s, lambda: flow.send(stream, num_bytes, sent=sent, arrived=arrived))

    def copy(self, flow: Flow, at_s: float, name: str, num_bytes: int) -> None:
        def arrived() -> None:
            self.arrived_s[name] = self.clock.now_s

        self.clock.at(at_s, lambda: flow.send_in_background(num_bytes, arrived=arrived))


def test_two_streams_get_half_each_and_one_alone_gets_all() -> None:
    traffic = Traffic()
    flow = traffic.flow(latency_s=1.0)
    traffic.send(flow, 0.0, "a", "a1", 4)
    traffic.send(flow, 0.0, "b", "b1", 2)
    traffic.clock.run()
    assert traffic.sent_s == {"b1": 4.0, "a1": 6.0}
    assert traffic.arrived_s == {"b1": 5.0, "a1": 7.0}


def test_a_stream_sends_one_message_after_the_other() -> None:
    traffic = Traffic()
    flow = traffic.flow(latency_s=10.0)
    traffic.send(flow, 0.0, "a", "a1", 3)
    traffic.send(flow, 1.0, "a", "a2", 3)
    traffic.clock.run()
    assert traffic.arrived_s == {"a1": 13.0, "a2": 16.0}
    assert flow.num_bytes == 6


def test_who_comes_later_slows_who_is_there() -> None:
    traffic = Traffic()
    flow = traffic.flow()
    traffic.send(flow, 0.0, "a", "a", 6)
    traffic.send(flow, 2.0, "b", "b", 1)
    traffic.send(flow, 4.0, "c", "c", 2)
    traffic.clock.run()
    assert traffic.arrived_s == pytest.approx({"b": 4.0, "c": 8.0, "a": 9.0})


messages = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from("abcd"), st.integers(1, 12)), min_size=1, max_size=12
)


def fluid(sends: list[tuple[int, str, int]], step_s: float = 1 / 64) -> list[float]:
    """When each message is sent, by small steps of time."""
    left = [float(num_bytes) for _, _, num_bytes in sends]
    ends = [0.0] * len(sends)
    queues: defaultdict[str, deque[int]] = defaultdict(deque)
    waiting = sorted(range(len(sends)), key=lambda index: sends[index][0])
    now_s = 0.0
    while waiting or any(queues.values()):
        while waiting and sends[waiting[0]][0] <= now_s:
            index = waiting.pop(0)
            queues[sends[index][1]].append(index)
        heads = [queue[0] for queue in queues.values() if queue]
        now_s += step_s
        for index in heads:
            left[index] -= step_s / len(heads)
            if left[index] <= 1e-9:
                ends[index] = now_s
                queues[sends[index][1]].popleft()
    return ends


@settings(deadline=None, max_examples=30)
@given(messages)
def test_the_line_is_shared_as_a_fluid_is(sends: list[tuple[int, str, int]]) -> None:
    traffic = Traffic()
    flow = traffic.flow()
    for number, (at_s, stream, num_bytes) in enumerate(sends):
        traffic.send(flow, at_s, stream, str(number), num_bytes)
    traffic.clock.run()
    found = [traffic.sent_s[str(number)] for number in range(len(sends))]
    assert found == pytest.approx(fluid(sends), abs=0.5)
    assert flow.num_bytes == sum(num_bytes for _, _, num_bytes in sends)


@given(messages, st.integers(0, 5))
def test_a_line_is_never_idle_while_something_waits(sends: list[tuple[int, str, int]], seed: int) -> None:
    traffic = Traffic()
    flow = traffic.flow(jitter_s=3.0, seed=str(seed))
    for number, (at_s, stream, num_bytes) in enumerate(sends):
        traffic.send(flow, at_s, stream, str(number), num_bytes)
    traffic.clock.run()
    free_s = 0.0
    for at_s, _, num_bytes in sorted(sends):
        free_s = max(free_s, at_s) + num_bytes
    assert max(traffic.sent_s.values()) == pytest.approx(free_s)


@given(st.integers(0, 1000))
def test_jitter_keeps_the_order_of_a_stream_and_comes_from_the_seed(seed: int) -> None:
    def arrivals_s() -> list[float]:
        traffic = Traffic()
        flow = traffic.flow(latency_s=5.0, jitter_s=4.0, seed=str(seed))
        for number in range(6):
            traffic.send(flow, 0.0, "a", str(number), 1)
        traffic.clock.run()
        return [traffic.arrived_s[str(number)] for number in range(6)]

    found = arrivals_s()
    assert found == sorted(found)
    assert all(number + 6.0 <= at_s <= 15.0 for number, at_s in enumerate(found))
    assert found == arrivals_s()


def test_a_slow_line_takes_longer_for_as_long_as_it_is_slow() -> None:
    traffic = Traffic()
    flow = traffic.flow(slowdowns=(Slowdown(start_s=2.0, end_s=6.0, factor=4.0),))
    traffic.send(flow, 0.0, "a", "a", 4)
    traffic.clock.run()
    assert traffic.arrived_s["a"] == 7.0


@pytest.mark.parametrize(("loses", "first_s"), [(True, 12.0), (False, 10.0)])
def test_nothing_passes_while_a_line_is_down(loses: bool, first_s: float) -> None:
    """The first message is under way when the line goes down, the second on the line."""
    traffic = Traffic()
    flow = traffic.flow(latency_s=2.0, slowdowns=(Slowdown(start_s=4.0, end_s=10.0, loses=loses),))
    traffic.send(flow, 0.0, "a", "a", 3)
    traffic.send(flow, 0.0, "a", "b", 2)
    traffic.clock.run()
    assert traffic.sent_s == {"a": 3.0, "b": 11.0}
    assert traffic.arrived_s == {"a": first_s, "b": 13.0}


def test_a_whisper_takes_no_room_but_waits_for_a_line_that_is_down() -> None:
    clock = Clock()
    heard: list[float] = []
    outage = Slowdown(start_s=5.0, end_s=9.0, loses=True)
    flow = Flow(clock, Line(down_bps=8.0, up_bps=8.0, latency_s=1.0), 8.0, slowdowns=[outage])
    flow.send("a", 100, sent=lambda: None, arrived=lambda: None)
    for at_s in (0.0, 4.5, 6.0):
        clock.at(at_s, lambda: flow.whisper(lambda: heard.append(clock.now_s)))
    clock.run()
    assert heard == [1.0, 10.0, 10.0]


def test_a_background_gets_its_share_and_all_that_is_left() -> None:
    traffic = Traffic()
    flow = traffic.flow(share=0.25)
    traffic.copy(flow, 0.0, "copy", 6)
    traffic.send(flow, 2.0, "a", "a", 6)
    traffic.clock.run()
    assert traffic.arrived_s == pytest.approx({"a": 10.0, "copy": 12.0})
    assert (flow.num_bytes, flow.background_bytes) == (6, 6)


def test_a_background_without_a_share_waits_for_all_messages() -> None:
    traffic = Traffic()
    flow = traffic.flow()
    traffic.copy(flow, 0.0, "copy", 6)
    traffic.send(flow, 2.0, "a", "a", 6)
    traffic.clock.run()
    assert traffic.arrived_s == pytest.approx({"a": 8.0, "copy": 12.0})


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from([2.0, 4.0])), max_size=3),
    st.floats(0, 20),
    st.floats(0.01, 9),
)
def test_work_under_slowdowns_ends_when_all_of_it_is_done(
    slow: list[tuple[int, int, float]], start_s: float, work_s: float
) -> None:
    slowdowns = [Slowdown(start_s=one, end_s=one + length, factor=factor) for one, length, factor in slow]
    end_s = Pace(slowdowns).end_s(start_s, work_s)
    edges = sorted(
        {start_s, end_s, *(e for one in slowdowns for e in (one.start_s, one.end_s) if start_s < e < end_s)}
    )
    done_s = 0.0
    for begin_s, finish_s in pairwise(edges):
        middle_s, speed = (begin_s + finish_s) / 2, 1.0
        for one in slowdowns:
            speed /= one.factor if one.start_s <= middle_s < one.end_s else 1.0
        done_s += (finish_s - begin_s) * speed
    assert done_s == pytest.approx(work_s)
