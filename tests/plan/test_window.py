"""Windows, and the bubbles that schedules leave with them on a virtual clock."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.pipeline import PipelineScheduler, Policy
from isthmus.plan.types import Action, Done, Optimize, Pass, Run, Send, Started
from isthmus.plan.window import Hop, window, windows
from tests.plan.driver import Costs, Driver

FORWARD_S, BACKWARD_S = 1.0, 2.0
COMPUTE_S = FORWARD_S + BACKWARD_S


def step_s(policy: Policy, num_microbatches: int, hops: Sequence[Hop], stage_windows: Sequence[int]) -> float:
    """The time of one step, from its start to the last stage's end."""

    def hop(stage: int, send: Send) -> Hop:
        return hops[stage - 1 if send.kind is Pass.BACKWARD else stage]

    def compute_s(_stage: int, action: Action) -> float:
        if not isinstance(action, Run):
            return 0.0
        return BACKWARD_S if action.kind is Pass.BACKWARD else FORWARD_S

    def serialise_s(stage: int, send: Send) -> float:
        one = hop(stage, send)
        return one.backward_s if send.kind is Pass.BACKWARD else one.forward_s

    costs = Costs(
        compute_s=compute_s,
        serialise_s=serialise_s,
        latency_s=lambda stage, send: hop(stage, send).latency_s,
    )
    num_stages = len(hops) + 1
    schedulers = [
        PipelineScheduler(stage=stage, num_stages=num_stages, policy=policy, window=stage_windows[stage])
        for stage in range(num_stages)
    ]
    driver = Driver(schedulers, costs)
    for stage in range(num_stages):
        driver.post(0.0, stage, Started(step=0, microbatches=tuple(range(num_microbatches))))
    optimized = Done(action=Optimize(step=0))
    return max(entry.at_s for entry in driver.run() if entry.event == optimized)


def bubble(policy: Policy, num_microbatches: int, hops: Sequence[Hop]) -> float:
    chosen = windows(policy=policy, num_microbatches=num_microbatches, hops=hops, interval_s=COMPUTE_S)
    return 1 - num_microbatches * COMPUTE_S / step_s(policy, num_microbatches, hops, chosen)


def equal_hops(num_stages: int, serialise_s: float, latency_s: float) -> list[Hop]:
    return [Hop(forward_s=serialise_s, backward_s=serialise_s, latency_s=latency_s)] * (num_stages - 1)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "serialise_s", "latency_s", "plain", "wan", "in_flight"),
    [(2, 16, 0.3, 3, 0.538, 0.167, 5), (2, 64, 1.5, 6, 0.716, 0.086, 7), (4, 128, 2, 10, 0.860, 0.174, 28)],
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
    hops = equal_hops(num_stages, serialise_s, latency_s)
    assert bubble(Policy.ONE_F_ONE_B, num_microbatches, hops) == pytest.approx(plain, abs=0.001)
    assert bubble(Policy.WAN_ONE_F_ONE_B, num_microbatches, hops) == pytest.approx(wan, abs=0.001)
    assert window(stage=0, hops=hops, interval_s=COMPUTE_S) == in_flight


@given(p=st.integers(2, 5), m=st.integers(1, 12), policy=st.sampled_from(list(Policy)))
@settings(deadline=None, max_examples=40)
def test_without_communication_every_policy_leaves_the_classic_bubble(p: int, m: int, policy: Policy) -> None:
    assert bubble(policy, m, equal_hops(p, 0.0, 0.0)) == pytest.approx((p - 1) / (m + p - 1))


hops_of_wans = st.lists(
    st.builds(
        Hop,
        forward_s=st.floats(0, COMPUTE_S / 2),
        backward_s=st.floats(0, COMPUTE_S / 2),
        latency_s=st.floats(0, 4 * COMPUTE_S),
    ),
    min_size=1,
    max_size=5,
)


@given(hops=hops_of_wans, m=st.integers(1, 24))
@settings(deadline=None, max_examples=60)
def test_the_window_hides_every_link_that_compute_can_hide(hops: list[Hop], m: int) -> None:
    """A step takes `m·t + (p-1)·t + 2·Σ tt`, though the window is far below m where links are short."""
    closed_form_s = (m + len(hops)) * COMPUTE_S + sum(hop.round_trip_s for hop in hops)
    chosen = windows(policy=Policy.WAN_ONE_F_ONE_B, num_microbatches=m, hops=hops, interval_s=COMPUTE_S)
    assert step_s(Policy.WAN_ONE_F_ONE_B, m, hops, chosen) <= closed_form_s + 1e-6


def test_one_micro_batch_less_in_flight_shows() -> None:
    hops = equal_hops(4, 0.3, 1.2)
    enough = [window(stage=stage, hops=hops, interval_s=COMPUTE_S) for stage in range(4)]
    full_s = step_s(Policy.WAN_ONE_F_ONE_B, 64, hops, enough)
    assert step_s(Policy.WAN_ONE_F_ONE_B, 64, hops, [max(1, one - 1) for one in enough]) > 1.1 * full_s


def test_each_round_trip_is_rounded_up_by_itself() -> None:
    hops = equal_hops(4, 0.0, 0.1)
    assert [window(stage=stage, hops=hops, interval_s=1.0) for stage in range(4)] == [7, 5, 3, 1]


def test_a_quotient_that_is_whole_but_for_rounding_is_not_rounded_up() -> None:
    assert window(stage=0, hops=[Hop(forward_s=0.1, backward_s=0.1, latency_s=0.05)], interval_s=0.1) == 5


def test_memory_has_the_last_word() -> None:
    hops = equal_hops(2, 1.5, 6.0)
    assert window(stage=0, hops=hops, interval_s=COMPUTE_S, max_in_flight=4) == 4


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Policy.GPIPE, (8, 2, 2)), (Policy.ONE_F_ONE_B, (3, 2, 1)), (Policy.WAN_ONE_F_ONE_B, (8, 2, 1))],
)
def test_a_small_window_binds_the_stages_behind_it(policy: Policy, expected: tuple[int, ...]) -> None:
    hops = equal_hops(3, 1.0, 10.0)
    caps = [99, 2, 99]
    found = windows(policy=policy, num_microbatches=8, hops=hops, interval_s=COMPUTE_S, max_in_flight=caps)
    assert found == expected


@pytest.mark.parametrize(("stage", "interval_s"), [(3, 1.0), (-1, 1.0), (0, 0.0)])
def test_a_window_of_nothing_is_refused(stage: int, interval_s: float) -> None:
    with pytest.raises(ValueError, match="stage"):
        window(stage=stage, hops=equal_hops(3, 1.0, 1.0), interval_s=interval_s)
