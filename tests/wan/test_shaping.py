import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.wan.shaping import End, Piece, Shape
from isthmus.wan.shaping import ShapedFlow as Flow
from isthmus.wan.shaping import ShapedLine as Line

MBPS = 1e6
SETTLED = pytest.approx(0, abs=0.002)

shapes = st.builds(
    Shape,
    bandwidth_bps=st.none() | st.floats(1 * MBPS, 1000 * MBPS),
    delay_s=st.floats(0, 0.2),
    jitter_s=st.floats(0, 0.05),
    connection_bps=st.none() | st.floats(1 * MBPS, 1000 * MBPS),
)
offers = st.lists(
    st.tuples(st.integers(0, 3), st.binary(min_size=1, max_size=4000), st.floats(0, 0.02)), max_size=40
)


def piece(num_bytes: int) -> memoryview:
    return memoryview(bytes(num_bytes))


def drain(line: Line, now_s: float = 0.0, *, late_s: float = 0.0) -> list[tuple[float, Flow, Piece]]:
    """Look whenever the line asks to be looked at, `late_s` late; return what came, and when it was seen."""
    arrived: list[tuple[float, Flow, Piece]] = []
    for _ in range(100_000):
        wake_s = line.wake_s()
        if wake_s is None:
            return arrived
        now_s = max(now_s, wake_s + late_s)
        arrived += [(now_s, flow, came) for flow, came in line.advance(now_s)]
    raise AssertionError("the line never comes to rest")


def last_s(arrived: list[tuple[float, Flow, Piece]], flow: Flow) -> float:
    return max(when_s for when_s, of, _ in arrived if of is flow)


def num_bytes_of(arrived: list[tuple[float, Flow, Piece]], flow: Flow) -> int:
    return sum(len(came) for _, of, came in arrived if of is flow and not isinstance(came, End))


@settings(deadline=None)
@given(shape=shapes, offers=offers, seed=st.integers(0, 9), late_s=st.floats(0, 0.05))
def test_every_byte_comes_once_and_in_order(
    shape: Shape, offers: list[tuple[int, bytes, float]], seed: int, late_s: float
) -> None:
    line, flows, now_s = Line(shape, seed=seed), [Flow() for _ in range(4)], 0.0
    sent: dict[Flow, bytes] = defaultdict(bytes)
    came: dict[Flow, bytes] = defaultdict(bytes)
    for number, data, pause_s in offers:
        now_s += pause_s
        line.offer(flows[number], memoryview(data), now_s)
        sent[flows[number]] += data
        for flow, arrived in line.advance(now_s):
            came[flow] += b"" if isinstance(arrived, End) else arrived
    for _, flow, arrived in drain(line, now_s, late_s=late_s):
        came[flow] += b"" if isinstance(arrived, End) else arrived
    assert came == sent
    assert line.backlog_bytes == 0


@settings(deadline=None)
@given(
    mbps=st.floats(10, 1000),
    delay_s=st.floats(0, 0.2),
    late_s=st.floats(0, 0.01),
    num_pieces=st.integers(1, 40),
)
def test_the_rate_does_not_drift_however_late_one_looks(
    mbps: float, delay_s: float, late_s: float, num_pieces: int
) -> None:
    line, flow = Line(Shape(bandwidth_bps=mbps * MBPS, delay_s=delay_s)), Flow()
    for _ in range(num_pieces):
        line.offer(flow, piece(10_000), 0.0)
    expected_s = num_pieces * 80_000 / (mbps * MBPS) + delay_s
    assert -0.001 <= last_s(drain(line, late_s=late_s), flow) - expected_s <= late_s + 0.001


def test_an_idle_line_saves_no_time_up_for_a_burst() -> None:
    line, flow = Line(Shape(bandwidth_bps=8 * MBPS)), Flow()
    line.advance(100.0)
    line.offer(flow, piece(10_000), 100.0)
    assert last_s(drain(line, 100.0), flow) - 100.01 == SETTLED


def test_a_small_message_is_not_stuck_behind_bulk() -> None:
    line, bulk, control = Line(Shape(bandwidth_bps=10 * MBPS)), Flow(), Flow()
    line.offer(bulk, piece(65_536), 0.0)
    line.offer(control, piece(100), 0.0)
    arrived = drain(line)
    assert last_s(arrived, control) < 0.005
    assert last_s(arrived, bulk) == pytest.approx(65_636 * 8 / 10e6, abs=0.002)


@settings(deadline=None)
@given(num_flows=st.integers(2, 8), mbps=st.floats(10, 1000))
def test_saturated_flows_share_evenly(num_flows: int, mbps: float) -> None:
    line, flows = Line(Shape(bandwidth_bps=mbps * MBPS)), [Flow() for _ in range(num_flows)]
    for flow in flows:
        line.offer(flow, piece(400_000), 0.0)
    middle_s = num_flows * 400_000 * 8 / (mbps * MBPS) / 2
    shares: dict[Flow, int] = defaultdict(int)
    for flow, came in line.advance(middle_s):
        shares[flow] += len(came) if isinstance(came, memoryview) else 0
    assert max(shares.values()) - min(shares.values()) <= 2 * line.quantum_bytes
    assert sum(shares.values()) == pytest.approx(num_flows * 200_000, abs=2 * line.quantum_bytes)


def test_a_connection_keeps_to_its_own_cap_and_leaves_the_rest_to_others() -> None:
    line, flows = (
        Line(Shape(bandwidth_bps=100 * MBPS, connection_bps=10 * MBPS)),
        [Flow() for _ in range(4)],
    )
    for flow in flows:
        line.offer(flow, piece(100_000), 0.0)
    arrived = drain(line)
    assert [last_s(arrived, flow) for flow in flows] == pytest.approx([0.08] * 4, abs=0.002)


def test_more_capped_connections_than_fit_fill_the_line() -> None:
    line, flows = (
        Line(Shape(bandwidth_bps=10 * MBPS, connection_bps=6 * MBPS)),
        [Flow() for _ in range(4)],
    )
    for flow in flows:
        line.offer(flow, piece(25_000), 0.0)
    assert max(last_s(drain(line), flow) for flow in [flows[-1]]) == pytest.approx(0.08, abs=0.003)


@settings(deadline=None)
@given(num_flows=st.integers(1, 20), mbps=st.floats(1, 1000))
def test_readers_that_keep_to_the_room_keep_to_the_buffer_and_a_newcomer_finds_room(
    num_flows: int, mbps: float
) -> None:
    line = Line(Shape(bandwidth_bps=mbps * MBPS))
    for flow in [Flow() for _ in range(num_flows)] * 20:
        if line.room_bytes(flow) > 0:
            line.offer(flow, piece(line.room_bytes(flow)), 0.0)
    assert line.backlog_bytes <= line.buffer_bytes + num_flows * line.quantum_bytes
    assert line.room_bytes(Flow()) >= line.quantum_bytes


def test_the_buffer_is_50_ms_of_the_line_but_at_least_64_kib() -> None:
    assert Line(Shape(bandwidth_bps=1000 * MBPS)).buffer_bytes == 6_250_000
    assert Line(Shape(bandwidth_bps=1 * MBPS)).buffer_bytes == 65_536


def test_jitter_stays_within_its_bound_and_follows_the_seed() -> None:
    def arrivals(seed: int) -> list[float]:
        line = Line(Shape(delay_s=0.1, jitter_s=0.05), seed=seed)
        for _ in range(50):
            line.offer(Flow(), piece(10), 0.0)
        return [when_s for when_s, _, _ in drain(line)]

    assert arrivals(1) == arrivals(1) != arrivals(2)
    assert 0.099 < min(arrivals(1)) < 0.11
    assert 0.14 < max(arrivals(1)) < 0.1501


def test_a_held_flow_waits_and_others_pass() -> None:
    line, held, other = Line(Shape(bandwidth_bps=8 * MBPS)), Flow(), Flow()
    held.held = True
    line.offer(held, piece(5_000), 0.0)
    line.offer(other, piece(5_000), 0.0)
    arrived = drain(line)
    assert (num_bytes_of(arrived, held), num_bytes_of(arrived, other)) == (0, 5_000)
    line.release(held, 10.0)
    assert last_s(drain(line, 10.0), held) - 10.005 == SETTLED


def test_silence_stops_all_and_all_comes_after() -> None:
    line, flow = Line(Shape(bandwidth_bps=8 * MBPS, delay_s=0.1)), Flow()
    line.offer(flow, piece(100_000), 0.0)
    line.advance(0.05)
    line.silence(5.0)
    assert line.advance(4.999) == []
    arrived = drain(line, 4.999)
    assert num_bytes_of(arrived, flow) == 100_000
    assert last_s(arrived, flow) == pytest.approx(5.15, abs=0.003)


def test_a_slow_down_divides_the_rate_for_its_time() -> None:
    line, flow = Line(Shape(bandwidth_bps=80 * MBPS)), Flow()
    line.slow_down(10.0, 0.5)
    line.offer(flow, piece(1_000_000), 0.0)
    assert last_s(drain(line), flow) == pytest.approx(0.55, abs=0.005)


def test_corruption_flips_as_many_bytes_of_bulk_as_asked_and_no_small_message() -> None:
    line, small, bulk = Line(Shape()), Flow(), Flow()
    line.corrupt(3)
    line.offer(small, piece(100), 0.0)
    line.offer(bulk, piece(5_000), 0.0)
    line.offer(bulk, piece(5_000), 0.0)
    came = dict.fromkeys((small, bulk), b"")
    for _, flow, part in drain(line):
        came[flow] += bytes(part) if isinstance(part, memoryview) else b""
    assert came[small] == bytes(100)
    assert len(came[bulk]) - came[bulk].count(0) == 3


def test_an_end_follows_the_last_byte_and_a_reset_overtakes_what_has_not_left() -> None:
    line, flow = Line(Shape(bandwidth_bps=8 * MBPS, delay_s=0.01)), Flow()
    line.offer(flow, piece(1_000), 0.0)
    line.offer(flow, End.EOF, 0.0)
    assert [came if isinstance(came, End) else len(came) for _, _, came in drain(line)] == [1_000, End.EOF]
    line.offer(flow, piece(50_000), 1.0)
    line.break_off(flow, 1.001)
    arrived = drain(line, 1.001)
    assert num_bytes_of(arrived, flow) < 3_000
    assert arrived[-1][2] is End.RESET
    assert line.backlog_bytes == 0


def test_what_is_dropped_does_not_come() -> None:
    line, flow = Line(Shape(bandwidth_bps=8 * MBPS)), Flow()
    line.offer(flow, piece(50_000), 0.0)
    line.drop(flow)
    assert num_bytes_of(drain(line), flow) <= line.quantum_bytes
    assert line.backlog_bytes == flow.backlog_bytes == 0


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"bandwidth_bps": 0.0}, "bandwidth_bps is 0.0"),
        ({"bandwidth_bps": math.inf}, "bandwidth_bps is inf"),
        ({"connection_bps": -1.0}, "connection_bps is -1.0"),
        ({"delay_s": -0.1}, "delay_s is -0.1"),
        ({"jitter_s": math.nan}, "jitter_s is nan"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(figures: dict[str, float], message: str) -> None:
    with pytest.raises(UserError) as raised:
        Shape(**figures)
    assert (raised.value.message, bool(raised.value.hint)) == (message, True)
