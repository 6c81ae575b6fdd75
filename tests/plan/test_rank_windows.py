"""The windows of a simulation are those of the workers, and with several ranks they keep every rank busy."""

from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.plan.pipeline import Policy
from isthmus.plan.rank_windows import Measured, first_windows, next_windows
from isthmus.plan.simulate import simulate
from isthmus.plan.window import Hop
from isthmus.train.courier import Courier
from isthmus.train.messages import Tally, pack_tally
from isthmus.train.pipeline import Course
from isthmus.train.settlement import Seen, Settlement, Terms
from tests.plan.scenarios import pipeline

# Sums and differences of these are exact.
times = st.integers(1, 600).map(lambda number: number / 64)


@dataclass
class Behind:
    """The stage behind, as far as the first stage sees it."""

    rtt_s: float
    sent: list[str] = field(default_factory=list)

    def send(self, stream: str, _make: object, **_: object) -> None:
        self.sent.append(stream)


def tally(busy_s: tuple[float, ...], hops: tuple[Hop, ...] = (), travel_s: float = 0.0) -> Tally:
    return Tally(step=0, loss_sum=1.0, squared_norms=(1.0,), busy_s=busy_s, hops=hops, travel_s=travel_s)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(times, min_size=2, max_size=4),
    st.lists(st.tuples(times, times), min_size=3, max_size=3),
    st.integers(1, 64),
)
def test_windows_are_those_that_workers_settle_on(
    busy_s: list[float], found: list[tuple[float, float]], num_microbatches: int
) -> None:
    hops = [Hop(forward_s=one, backward_s=one, latency_s=other) for one, other in found][: len(busy_s) - 1]
    first, *behind = hops
    down = Behind(rtt_s=2 * first.latency_s)
    settlement = Settlement(terms=Terms(num_microbatches=num_microbatches, max_in_flight=num_microbatches))
    travel_s = first.forward_s + first.latency_s
    settlement.on_tally(pack_tally(tally(tuple(busy_s[1:]), tuple(behind), travel_s)))
    _, verdict = settlement.settle(
        tally((busy_s[0],)), seen=Seen(gradient_travel_s=travel_s), up=None, down=cast("Courier", down)
    )
    measured = Measured(pass_s=tuple(one / num_microbatches for one in busy_s), hops=tuple(hops))
    scenario = pipeline(len(busy_s), num_microbatches)
    assert next_windows(scenario, measured) == verdict.windows
    assert down.sent == ["verdict"]


@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from(list(Policy)))
def test_first_windows_are_those_that_workers_begin_with(p: int, m: int, policy: Policy) -> None:
    course = Course(num_stages=p, num_steps=1, num_microbatches=m, seed=0, max_in_flight=m, policy=policy)
    assert first_windows(pipeline(p, m, policy=policy)) == course.first_windows()


@pytest.mark.parametrize("ranks", [(2, 2, 2), (4, 1, 2), (1, 4, 1), (2, 3, 1)])
def test_ranks_with_measured_windows_are_as_busy_as_with_all_in_flight(ranks: tuple[int, ...]) -> None:
    """Stages of several ranks, each so much slower that all stages keep step."""
    plain = pipeline(3, 48, serialise_s=0.1, latency_s=2.0)
    loads = zip(plain.stages, ranks, strict=True)
    scenario = replace(
        plain,
        stages=tuple(
            replace(one, num_ranks=number, forward_s=float(number), backward_s=2.0 * number)
            for one, number in loads
        ),
    )
    found = simulate(scenario, num_steps=3).steps[-1]
    unbounded = simulate(replace(scenario, windows=(48, 48, 48))).steps[-1]
    assert found.duration_s <= 1.02 * unbounded.duration_s
    assert found.windows[0] * ranks[0] < 48
