"""Levers say what one thing changed would bring."""

from isthmus.plan.levers import Lever, levers
from isthmus.plan.planner import plan
from tests.plan.jobs import two_clouds

SLOW = ("strategy.kind=pipeline", "link.0.codec=raw", "link.0.bandwidth=500 Mbps")


def pull(*changes: str) -> dict[str, Lever]:
    job = two_clouds(*changes)
    return {one.what: one for one in levers(job, plan(job, is_quick=True))}


def test_a_bound_link_gains_from_bandwidth_and_codecs() -> None:
    found = pull(*SLOW)
    assert -0.55 < found["twice the bandwidth"].step_change < -0.3
    assert found["int4 on every link"].step_change < -0.5
    assert abs(found["half the round trip"].step_change) < 0.1
    assert [one.step_change for one in found.values()] == sorted(one.step_change for one in found.values())


def test_bound_compute_gains_from_neither() -> None:
    found = pull("strategy.kind=pipeline", "link.0.bandwidth=100 Gbps", "link.0.rtt=1 ms")
    assert abs(found["twice the bandwidth"].step_change) < 0.02
    assert abs(found["int4 on every link"].step_change) < 0.02


def test_float32_gains_from_bfloat16() -> None:
    found = pull("strategy.kind=pipeline", "train.precision=float32", "link.0.bandwidth=100 Gbps")
    assert found["train.precision = bfloat16"].step_change < -0.5


def test_forms_without_a_pipeline_have_none() -> None:
    assert pull("strategy.kind=data") == {}
