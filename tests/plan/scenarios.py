"""Pipelines for tests: equal ones by a few numbers, and random ones."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from isthmus.plan.codecs import Choice, Pair, choose
from isthmus.plan.scenario import HopLoad, Line, Policy, Scenario, StageLoad

BYTES_PER_S = 1_000_000


def line(*, latency_s: float = 0.0, jitter_s: float = 0.0) -> Line:
    """One that takes a megabyte a second either way."""
    rate_bps = 8.0 * BYTES_PER_S
    return Line(down_bps=rate_bps, up_bps=rate_bps, latency_s=latency_s, jitter_s=jitter_s)


def hop(serialise_s: float, latency_s: float, *, jitter_s: float = 0.0, coding_s: float = 0.0) -> HopLoad:
    num_bytes = round(serialise_s * BYTES_PER_S)
    return HopLoad(
        line=line(latency_s=latency_s, jitter_s=jitter_s),
        forward_bytes=num_bytes,
        backward_bytes=num_bytes,
        forward_coding_s=coding_s,
        backward_coding_s=coding_s,
    )


def stage(index: int, forward_s: float = 1.0, backward_s: float = 2.0, **more: float) -> StageLoad:
    return StageLoad(
        cloud=f"cloud{index}",
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=more.get("update_s", 0.0),
        num_ranks=int(more.get("num_ranks", 1)),
    )


def pipeline(
    num_stages: int,
    num_microbatches: int,
    *,
    serialise_s: float = 0.0,
    latency_s: float = 0.0,
    policy: Policy = Policy.WAN_ONE_F_ONE_B,
    windows: Sequence[int] | None = None,
    num_ranks: int = 1,
) -> Scenario:
    """Equal stages, a forward of 1 s and a backward of 2 s, on equal lines."""
    return Scenario(
        stages=tuple(stage(index, num_ranks=num_ranks) for index in range(num_stages)),
        hops=(hop(serialise_s, latency_s),) * (num_stages - 1),
        num_microbatches=num_microbatches,
        policy=policy,
        windows=None if windows is None else tuple(windows),
    )


times = st.floats(0.001, 5.0)


@st.composite
def scenarios(draw: st.DrawFn, *, max_ranks: int = 3) -> Scenario:
    """Any pipeline of up to four stages, with windows left to be found."""
    num_stages = draw(st.integers(1, 4))
    stages = tuple(
        stage(
            index,
            draw(times),
            draw(times),
            update_s=draw(st.sampled_from([0.0, 0.5])),
            num_ranks=draw(st.integers(1, max_ranks)),
        )
        for index in range(num_stages)
    )
    hops = tuple(
        hop(draw(times), draw(times), jitter_s=draw(st.sampled_from([0.0, 1.0])), coding_s=draw(times))
        for _ in range(num_stages - 1)
    )
    return Scenario(
        stages=stages,
        hops=hops,
        num_microbatches=draw(st.integers(1, 12)),
        policy=draw(st.sampled_from(list(Policy))),
        first_trained=draw(st.integers(0, num_stages - 1)),
    )


def changed(pair: Pair, *crossing_and_figures: Any, **options: Any) -> Choice | None:
    """What a link that has these codecs changes to, None where it keeps them."""
    found = choose(*crossing_and_figures, **options, current=pair)
    return None if found.pair == pair else found
