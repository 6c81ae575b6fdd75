"""A run follows the plan that is shown for its job file, and starts with the codecs of that plan."""

from pathlib import Path

import pytest

from isthmus.job import PipelineStrategy, load_job
from isthmus.job.load import update_job_file
from isthmus.plan.codecs import texts_of
from isthmus.plan.plan import Form, Plan, planned_changes
from isthmus.plan.planner import plan
from isthmus.train.build import blueprint_of
from isthmus.train.pipeline_config import decide, plan_run, run_config
from tests.plan.jobs import TWO_CLOUDS, two_clouds
from tests.plan.test_search import random_job

PIPELINE = "strategy.kind=pipeline"
UNLIKE = ("cloud.east.accelerator=h100", "cloud.west.accelerator=l4")
JOBS = {
    "equal clouds": (PIPELINE,),
    "a thin link": (PIPELINE, "link.0.bandwidth=20 Mbps"),
    "a line with two speeds": (PIPELINE, "link.0.bandwidth=['20 Mbps','2 Gbps']", "limits.codec_loss=none"),
    "a given order": (PIPELINE, "strategy.clouds=['west', 'east']"),
    "little memory": (PIPELINE, "cloud.east.memory=7 GiB", "cloud.west.memory=7 GiB"),
}


def codecs_of(shown: Plan) -> list[tuple[str, str]]:
    return [(one.forward_codec, one.backward_codec) for one in shown.links]


@pytest.mark.parametrize("changes", JOBS.values(), ids=JOBS)
def test_a_run_follows_the_plan_that_is_shown(changes: tuple[str, ...]) -> None:
    job = two_clouds(*changes)
    shown, followed = plan(job, is_quick=True), plan_run(job)
    assert followed is not None
    assert (followed.clouds, followed.scenario) == (shown.clouds, shown.scenario)
    assert codecs_of(followed) == codecs_of(shown)


def test_a_run_that_keeps_another_order_says_how_to_take_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(TWO_CLOUDS)
    unlike = [*UNLIKE, PIPELINE]
    job = load_job(file, overrides=unlike)
    shown, followed = plan(job, is_quick=True), plan_run(job)
    assert shown.clouds == ("west", "east")
    assert followed is not None
    assert followed.clouds == ("east", "west")
    assert "isthmus plan JOB --write" in followed.notes[0]
    update_job_file(file, planned_changes(job, shown))
    again = plan_run(load_job(file, overrides=unlike))
    assert again is not None
    assert (again.clouds, again.scenario) == (shown.clouds, shown.scenario)


def test_a_run_starts_with_the_codecs_of_its_plan() -> None:
    job = two_clouds(PIPELINE, "link.0.bandwidth=20 Mbps")
    shown = plan_run(job)
    assert shown is not None
    blueprint = blueprint_of(job, config={}, num_labels=None)
    config = run_config(job, decide(job, shown.decisions), blueprint, num_validation_microbatches=0)
    assert [texts_of(cut.codecs) for cut in config.pipeline.cuts] == codecs_of(shown)
    assert codecs_of(shown) != [("raw", "raw")]


@pytest.mark.parametrize("seed", [0, 1, 3, 9, 14, 22])
def test_auto_chooses_only_what_can_be_run(seed: int) -> None:
    job = random_job(seed, "strategy.kind=auto")
    shown = plan(job, is_quick=True)
    assert shown.form in (Form.PIPELINE, Form.ALONE)
    strategy = PipelineStrategy.model_validate(planned_changes(job, shown)["strategy"])
    followed = plan_run(job.model_copy(update={"strategy": strategy}).used())
    assert followed is not None
    assert (followed.clouds, followed.scenario) == (shown.clouds, shown.scenario)
