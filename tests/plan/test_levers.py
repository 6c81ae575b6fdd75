"""Levers say what one thing changed would bring."""

from pathlib import Path

import pytest

from isthmus.job import load_job
from isthmus.plan.plan import Form
from isthmus.plan.planner import Lever, levers, plan
from tests.plan.jobs import two_clouds

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def test_twice_the_ranks_cost_twice_the_price() -> None:
    priced = ("cloud.east.usd_per_hour=3", "cloud.west.usd_per_hour=3")
    lever = pull("strategy.kind=data", *priced)["twice the ranks at east and west"]
    assert lever.step_change < -0.3
    assert lever.usd_change == pytest.approx(2 * (1 + lever.step_change) - 1)


def test_copies_that_hide_their_traffic_gain_from_compute_alone() -> None:
    found = pull("strategy.kind=data", "strategy.inner_steps=40", "strategy.bits=8", "link.0.usd_per_gib=1")
    assert set(found) == {
        "twice the bandwidth",
        "strategy.inner_steps = 80",
        "strategy.bits = 4",
        "twice the batch, per token",
        "twice the ranks at east and west",
    }
    assert found["twice the bandwidth"].step_change == 0
    rarer, coarser = found["strategy.inner_steps = 80"], found["strategy.bits = 4"]
    assert rarer.step_change == coarser.step_change == 0
    # Either sends half the bytes.
    assert rarer.usd_change == pytest.approx(coarser.usd_change)
    assert -0.5 < (rarer.usd_change or 0) < -0.2


def test_copies_that_wait_for_a_line_gain_from_all_that_relieves_it() -> None:
    thin = ("strategy.kind=data", "strategy.inner_steps=60", "strategy.bits=8", "link.0.bandwidth=5 Mbps")
    found = pull(*thin)
    assert found["twice the bandwidth"].step_change == pytest.approx(-0.5)
    assert found["strategy.bits = 4"].step_change == pytest.approx(-0.5)
    assert found["strategy.inner_steps = 30"].step_change == pytest.approx(1.0)
    assert "strategy.inner_steps = 120" not in found, "nobody has published so few synchronisations"
    assert "half the round trip" not in found


def test_copies_made_one_in_every_step_wait_for_round_trips() -> None:
    exact = ("strategy.kind=data", "strategy.inner_steps=1", "strategy.bits=32", "link.0.bandwidth=100 Gbps")
    found = pull(*exact, "link.0.rtt=800 ms")
    assert found["half the round trip"].step_change < -0.05
    assert found["strategy.inner_steps = 30"].step_change < 2 * found["half the round trip"].step_change
    assert "strategy.bits = 16" in found


def test_levers_keep_to_the_quality_that_is_allowed() -> None:
    found = pull("strategy.kind=data", "limits.codec_loss=none")
    assert "half the round trip" in found
    assert not [one for one in found if one.startswith("strategy.")]


def test_copies_that_were_asked_for_grow_together() -> None:
    job = two_clouds("strategy.kind=data", "link.0.bandwidth=100 Mbps", "link.0.rtt=500 ms")
    chosen = plan(job)
    assert chosen.form is Form.DATA
    assert "twice the ranks at east and west" in {one.what for one in levers(job, chosen)}


def test_the_slower_role_gains_from_ranks() -> None:
    job = load_job(EXAMPLES / "plan-generator.toml")
    found = {one.what: one for one in levers(job, plan(job, is_quick=True))}
    assert set(found) == {
        "twice the ranks at gpus",
        "strategy.discriminator_cloud = gpus",
        "twice the batch, per token",
        "twice the bandwidth",
        "twice the ranks at npus",
    }
    assert found["twice the ranks at gpus"].step_change < -0.45
    assert found["twice the ranks at npus"].step_change == pytest.approx(0, abs=1e-3)
    assert (found["twice the ranks at npus"].usd_change or 0) > 0.5


def test_generators_behind_a_thin_line_gain_from_bandwidth() -> None:
    job = load_job(EXAMPLES / "plan-generator.toml", overrides=["link.0.bandwidth=500 kbps"])
    found = {one.what: one for one in levers(job, plan(job, is_quick=True))}
    assert found["twice the bandwidth"].step_change == pytest.approx(-0.5)
    assert found["twice the ranks at gpus"].step_change == pytest.approx(0, abs=1e-3)
