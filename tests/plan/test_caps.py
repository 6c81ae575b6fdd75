"""What each stage may keep in flight: one cap for all, or one for each, from memory and the job."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.job import Job, PipelineStrategy, load_job
from isthmus.job.load import update_job_file
from isthmus.plan.plan import (
    Decisions,
    PipelineSettings,
    decisions_of,
    plan_to_json,
    planned_changes,
    scenario_of,
)
from isthmus.plan.planner import plan
from isthmus.plan.scenario import Scenario, expected, first_windows, next_windows
from isthmus.plan.simulated import simulate_scenario
from tests.plan.jobs import THIRD_CLOUD, TWO_CLOUDS, link, two_clouds
from tests.plan.scenarios import hop, stage

IN_ROW = "strategy.clouds=['east', 'west', 'north']"
# West is in the middle, where a window hides the link behind it, and has little memory.
TIGHT = ("cloud.west.memory=4.4 GiB", "link.0.rtt=800 ms", "link.1.rtt=800 ms", "train.recompute=true")
CUT = ("strategy.layers=[4, 4, 4]", "strategy.microbatches=32")
MORE = THIRD_CLOUD + link("west", "north")


def three_stages(*ranks: int) -> Scenario:
    return Scenario(
        stages=tuple(stage(index, num_ranks=one) for index, one in enumerate(ranks)),
        hops=(hop(0.25, 4.0),) * 2,
        num_microbatches=24,
    )


def three_clouds(*overrides: str) -> Job:
    return two_clouds("strategy.kind=pipeline", IN_ROW, *TIGHT, *CUT, *overrides, more=MORE)


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 2, 2), (4, 2, 1)])
def test_a_late_stage_with_little_memory_binds_itself_alone(ranks: tuple[int, ...]) -> None:
    scenario = three_stages(*ranks)
    free = next_windows(scenario, expected(scenario))
    caps = (24, free[1] - 1, 24)
    assert next_windows(scenario, expected(scenario), max_in_flight=caps)[:2] == (free[0], free[1] - 1)
    assert first_windows(scenario, max_in_flight=(1, 1, 1)) == (1, 1, 1)
    alike = next_windows(scenario, expected(scenario), max_in_flight=free[1] - 1)
    assert alike == next_windows(scenario, expected(scenario), max_in_flight=(free[1] - 1,) * 3)
    assert alike[0] < free[0]


def test_a_plan_bounds_each_stage_by_its_own_memory() -> None:
    chosen = plan(three_clouds(), is_quick=True)
    assert isinstance(chosen.settings, PipelineSettings)
    caps = chosen.settings.max_in_flight
    assert isinstance(caps, tuple)
    assert caps[1] < chosen.stages[0].window
    assert chosen.scenario is not None
    timeline = simulate_scenario(chosen.scenario, num_steps=3)
    assert all(one <= cap for one, cap in zip(timeline.steps[-1].windows, caps, strict=True))
    bound_alike = simulate_scenario(replace(chosen.scenario, max_in_flight=caps[1]), num_steps=3)
    assert timeline.step_s < 0.95 * bound_alike.step_s
    assert all(one.memory_bytes <= 0.9 * (one.capacity_bytes or 0) for one in chosen.stages)


def test_what_a_plan_decides_is_read_back() -> None:
    chosen = plan(three_clouds(), is_quick=True)
    text = plan_to_json(chosen)
    assert decisions_of(text) == chosen.decisions
    assert scenario_of(text) == chosen.scenario


@pytest.mark.parametrize("caps", [None, 3, (4, 2)])
def test_decisions_of_any_form_are_read_back(caps: int | tuple[int, ...] | None) -> None:
    values = {"layers": [1, 1], "num_microbatches": 8, "recompute": False, "codecs": [], "reasons": []}
    found = decisions_of(json.dumps({"version": 1, "decisions": {**values, "max_in_flight": caps}}))
    assert found == Decisions(
        layers=(1, 1), num_microbatches=8, max_in_flight=caps, recompute=False, codecs=()
    )


def test_a_plan_that_is_written_is_planned_again(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(TWO_CLOUDS + MORE)
    given = [*TIGHT, *CUT, "strategy.kind=pipeline", IN_ROW]
    job = load_job(file, overrides=given)
    chosen = plan(job, is_quick=True)
    changes = planned_changes(job, chosen)
    update_job_file(file, changes)
    written = load_job(file, overrides=TIGHT)
    assert isinstance(written.strategy, PipelineStrategy)
    assert isinstance(chosen.settings, PipelineSettings)
    assert written.strategy.max_in_flight == chosen.settings.max_in_flight
    again = plan(written, is_quick=True)
    assert [one.window for one in again.stages] == [one.window for one in chosen.stages]


def test_equal_caps_are_one_number() -> None:
    fixed = ("strategy.max_in_flight=2", "strategy.microbatches=32")
    job = two_clouds("strategy.kind=pipeline", "link.0.rtt=400 ms", *fixed)
    chosen = plan(job, is_quick=True)
    assert isinstance(chosen.settings, PipelineSettings)
    assert chosen.settings.max_in_flight == 2
    assert planned_changes(job, chosen)["strategy"]["max_in_flight"] == 2


def test_a_job_gives_each_stage_its_own() -> None:
    far = ("strategy.kind=pipeline", "link.0.rtt=400 ms", "strategy.microbatches=32")
    windows = [
        plan(two_clouds(*far, f"strategy.max_in_flight={caps}"), is_quick=True).stages[0].window
        for caps in ("[4, 1]", "[3, 1]")
    ]
    assert windows == [4, 3]


def test_caps_are_one_for_each_stage() -> None:
    with pytest.raises(UserError, match=r"strategy\.max_in_flight has 3 entries for 2 stages"):
        plan(two_clouds("strategy.kind=pipeline", "strategy.max_in_flight=[1, 2, 3]"))
