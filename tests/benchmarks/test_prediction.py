"""The stages that sleep go through the product's own rig, as real ones do."""

import predicted.measuring as measuring
import pytest
from predicted.cases import QUICK_WANS, sleeping_cases
from predicted.stages import SleepingStages

from isthmus.plan.scenario import Policy


@pytest.mark.parametrize("number", [0, 2])
def test_a_sleeping_stage_can_be_profiled(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PROFILE_S", 0.0)
    case = sleeping_cases(QUICK_WANS, 6, seed=0)[number]
    profile = measuring.profile_stage(case, case.stages.build(0), lambda: None)
    (times,) = profile.samples[0].layers
    assert isinstance(case.stages, SleepingStages)
    nap = case.stages.naps[0]
    assert times.forward_s >= nap.forward_s
    assert times.backward_s >= nap.backward_s


def test_cases_have_the_policy_of_a_run_unless_told() -> None:
    assert {one.policy for one in sleeping_cases(QUICK_WANS, 6, seed=0)} == {Policy.WAN_ONE_F_ONE_B.value}
