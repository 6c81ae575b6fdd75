"""What limits a plan is what would shorten its step the most if it were unlimited, as simulated."""

from dataclasses import replace

import pytest

from isthmus.plan.planner import limiting, plan, reliefs
from isthmus.plan.scenario import HopLoad, Line, Scenario, StageLoad
from tests.plan.jobs import two_clouds

PIPELINE = ("strategy.kind=pipeline", "link.0.codec=raw")


def scenario(*, bandwidth_bps: float = 1e9, latency_s: float = 0.01, cap: int | None = None) -> Scenario:
    """Two stages of 30 and 60 ms and a message of 10 ms at 1 Gbit/s."""
    line = Line(down_bps=bandwidth_bps, up_bps=bandwidth_bps, latency_s=latency_s)
    stages = [
        StageLoad(cloud=name, forward_s=share * 0.01, backward_s=share * 0.02)
        for name, share in (("east", 1), ("west", 2))
    ]
    return Scenario(
        stages=tuple(stages),
        hops=(HopLoad(line=line, forward_bytes=1_250_000, backward_bytes=1_250_000),),
        num_microbatches=16,
        max_in_flight=cap,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (scenario(), "compute of west"),
        (scenario(bandwidth_bps=5e7), "bandwidth of east-west"),
        (scenario(latency_s=2.0), "round trip of east-west"),
        (scenario(latency_s=0.2, cap=1), "room in flight at east and the round trip of east-west"),
    ],
    ids=["compute", "bandwidth", "round trip", "room"],
)
def test_it_is_what_there_is_least_of(given: Scenario, expected: str) -> None:
    found = limiting(reliefs(given))
    assert sorted(found.split(" and the ")) == sorted(expected.split(" and the "))


def test_one_cloud_alone_is_limited_by_its_compute() -> None:
    alone = Scenario(stages=scenario().stages[:1], hops=(), num_microbatches=16)
    assert list(reliefs(alone)) == ["compute of east"]


def test_two_that_would_bring_nearly_as_much_are_both_named() -> None:
    assert limiting({"a": 0.5, "b": 0.4, "c": 0.4}) == "a and the b"
    assert limiting({"a": 0.5, "b": 0.3}) == "a"


def test_where_too_little_is_in_flight_to_hide_a_line_codecs_are_stronger() -> None:
    job = two_clouds("strategy.kind=pipeline", "link.0.bandwidth=5 Gbps", "strategy.microbatches=64")
    strict = job.model_copy(update={"strategy": job.strategy.model_copy(update={"policy": "1f1b"})})
    hidden, waiting = plan(job), plan(strict)
    assert waiting.links[0].down_bytes < hidden.links[0].down_bytes
    assert "too few micro-batches are in flight" in waiting.links[0].reason


def test_reliefs_do_not_depend_on_what_is_not_there() -> None:
    assert "room in flight at east" not in reliefs(scenario())
    assert reliefs(replace(scenario(), windows=(1, 1)))["room in flight at east"] > 0
