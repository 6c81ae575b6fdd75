"""Traffic has a price, so copies are made one more rarely or more coarsely where money asks for it."""

import pytest

from isthmus.errors import UserError
from isthmus.plan.plan import DataSettings, Plan
from isthmus.plan.planner import plan
from tests.plan.jobs import two_clouds

DEAR = ("strategy.kind=data", "link.0.usd_per_gib=1", "link.0.bandwidth=10 Gbps")


def planned(*changes: str) -> Plan:
    return plan(two_clouds(*DEAR, *changes))


def usd(plan: Plan) -> float:
    assert plan.estimate.total_usd is not None
    return plan.estimate.total_usd


def settings(plan: Plan) -> tuple[int, int]:
    assert isinstance(plan.settings, DataSettings)
    return plan.settings.inner_steps, plan.settings.bits


def test_without_limits_the_most_exact_that_is_hidden_is_taken() -> None:
    assert settings(planned()) == (30, 8)


@pytest.mark.parametrize(("share", "expected"), [(0.99, (30, 4)), (0.4, (40, 4)), (0.3, (75, 4))])
def test_a_budget_is_kept_by_rarer_and_coarser_synchronisation(
    share: float, expected: tuple[int, int]
) -> None:
    free = planned()
    thrifty = planned(f"limits.budget_usd={share * usd(free)}")
    assert usd(thrifty) <= share * usd(free)
    assert settings(thrifty) == expected
    assert thrifty.estimate.step_s == pytest.approx(free.estimate.step_s, rel=0.02)


def test_a_budget_that_is_no_bound_changes_nothing() -> None:
    free = planned()
    assert settings(planned(f"limits.budget_usd={1.01 * usd(free)}")) == settings(free)


def test_a_deadline_asks_for_the_cheapest() -> None:
    free = planned()
    cheap = planned(f"limits.deadline={2 * free.estimate.total_s} s")
    assert settings(cheap) == (100, 4)
    assert usd(cheap) < 0.5 * usd(free)


def test_what_no_synchronisation_keeps_is_refused() -> None:
    cheap = planned("limits.deadline=1 d")
    with pytest.raises(UserError, match="the cheapest plan costs"):
        planned(f"limits.budget_usd={0.9 * usd(cheap)}")
    assert settings(planned(f"limits.budget_usd={1.001 * usd(cheap)}")) == (100, 4)
