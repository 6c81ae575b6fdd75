"""`isthmus plan`: tables, JSON, pictures, and the choice written into the job."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.errors import JobError, UserError
from isthmus.job import PipelineStrategy, load_job
from isthmus.plan.costs import Precision
from isthmus.plan.plan import follow, scenario_of
from isthmus.plan.times import PassTimes, Profile, Sample, write_profile
from tests.plan.jobs import TWO_CLOUDS

WIDE = {"COLUMNS": "240"}


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(f"# as it was\n{TWO_CLOUDS}  # the end\n")
    return path


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env=WIDE)


@pytest.mark.slow
def test_tables_and_a_picture_are_shown(job_file: Path) -> None:
    result = invoke(job_file, "--set", "strategy.kind=pipeline")
    assert result.exit_code == 0, result.output
    for word in (
        "tokens/s",
        "memory of a rank",
        "$/Mtoken",
        "limited by",
        "taken",
        "codec there",
        "100 steps take",
        "east→west",
        "forward",
        "bubble",
        "--write puts this choice into the job",
    ):
        assert word in result.output, word


def test_the_warm_up_of_a_bottleneck_is_told_of(job_file: Path) -> None:
    given = ("--set", "strategy.kind=pipeline", "--set", "strategy.microbatches=8", "--set")
    result = invoke(job_file, *given, "link.0.boundary=bottleneck(64, warmup=20)")
    assert "the first 20 steps cross raw: " in result.output
    refused = invoke(job_file, *given, "link.0.boundary=bottleneck(64)").exception
    assert isinstance(refused, UserError)
    assert "begins after 100 steps, but the run has 100" in str(refused)


def test_every_runner_up_has_a_why(job_file: Path) -> None:
    result = invoke(job_file, "--json")
    facts = json.loads(result.stdout)
    assert facts["runners_up"]
    assert all(one["why"] for one in facts["runners_up"])


def test_json_is_a_plan(job_file: Path) -> None:
    result = invoke(job_file, "--json", "--set", "strategy.kind=pipeline", "--set", "strategy.microbatches=8")
    facts = json.loads(result.stdout)
    assert facts["version"] == 1
    assert facts["settings"]["num_microbatches"] == 8
    assert 0 < facts["estimate"]["bubble"] < 1
    assert scenario_of(result.stdout) is not None


def test_write_puts_the_choice_into_the_job_and_nothing_else(job_file: Path) -> None:
    before = job_file.read_text()
    result = invoke(job_file, "--write", "--set", "strategy.kind=pipeline")
    assert result.exit_code == 0, result.output
    after = job_file.read_text()
    assert after.startswith("# as it was")
    assert "# the end" in after
    assert all(line in after for line in before.splitlines() if line)
    strategy = load_job(job_file).strategy
    assert isinstance(strategy, PipelineStrategy)
    assert strategy.layers is not None
    assert sum(strategy.layers) == 12
    again = json.loads(invoke(job_file, "--json").stdout)
    assert again["settings"]["num_microbatches"] == strategy.microbatches


@pytest.mark.parametrize("kind", ["data", "pipeline"])
def test_what_was_written_is_planned_again(job_file: Path, kind: str) -> None:
    first = json.loads(invoke(job_file, "--json", "--write", "--set", f"strategy.kind={kind}").stdout)
    second = json.loads(invoke(job_file, "--json").stdout)
    assert first["settings"] == second["settings"]
    assert first["what"] == second["what"]


@pytest.mark.parametrize("change", ["train.steps=7", "link.0.rtt=1 ms", "strategy.windows=[1, 1]"])
def test_the_plan_of_a_changed_job_is_not_written(job_file: Path, change: str) -> None:
    before = job_file.read_text()
    result = invoke(job_file, "--write", "--set", "strategy.kind=pipeline", "--set", change)
    assert isinstance(result.exception, UserError)
    assert result.exception.message == (
        f"--write would put the plan of a job changed by --set {change} into {job_file}"
    )
    assert job_file.read_text() == before


def test_a_cloud_without_a_price_is_named(tmp_path: Path) -> None:
    path = tmp_path / "priceless.toml"
    own = '[[accelerator]]\nname = "mine"\nflops = "312 TFLOPS"\nmemory = "80 GiB"\n'
    path.write_text(f'{TWO_CLOUDS}\n{own}[strategy]\nkind = "pipeline"\n')
    shown = invoke(path, "--set", "cloud.west.accelerator=mine").output
    assert "the price of cloud west is not known: set cloud.west.usd_per_hour" in shown
    assert "the price of cloud east" not in shown


def tight_job(path: Path, *, memory: str) -> Path:
    """Clouds of four ranks with little memory, as a file."""
    text = TWO_CLOUDS.replace("listen =", f'memory = "{memory}"  # of each\nranks = 4\nlisten =')
    path.write_text(text + '[strategy]\nkind = "pipeline"\n')
    return path


@pytest.mark.parametrize(
    ("memory", "sharding", "options"),
    [
        ("7 GiB", "optimizer", (False, False, 32)),
        ("3.5 GiB", "full", (True, False, 32)),
    ],
)
def test_what_spares_memory_is_written_and_runs(
    tmp_path: Path, memory: str, sharding: str, options: tuple[bool, bool, int]
) -> None:
    from isthmus.train.pipeline_config import plan_run

    path = tight_job(tmp_path / "tight.toml", memory=memory)
    first = json.loads(invoke(path, "--json", "--write").stdout)
    assert path.read_text().count("# of each") == 2
    written = load_job(path)
    train = written.train
    assert [cloud.sharding for cloud in written.cloud] == [sharding] * 2
    assert (train.recompute, train.offload_optimizer, train.optimizer_bits) == options
    assert [stage["sharding"] for stage in first["stages"]] == [sharding] * 2
    assert tuple(first["memory_options"].values())[:3] == options
    plan = plan_run(written)
    assert plan is not None
    assert plan.decisions is not None
    assert follow(written, plan.clouds, plan.decisions) == written
    assert plan.decisions.layers == tuple(first["decisions"]["layers"])


def test_all_times_are_simulated(job_file: Path) -> None:
    facts = json.loads(invoke(job_file, "--json").stdout)
    every = [facts, *facts["runners_up"]]
    assert "data" in {one["form"] for one in every}
    assert all(one["estimate"]["is_simulated"] for one in every)


def test_pictures(job_file: Path, tmp_path: Path) -> None:
    svg, html = tmp_path / "plan.svg", tmp_path / "plan.html"
    for kind in ("pipeline", "data"):
        result = invoke(job_file, "--set", f"strategy.kind={kind}", "--svg", svg, "--html", html)
        assert result.exit_code == 0, result.output
        assert svg.read_text().startswith("<svg")
        page = html.read_text()
        assert "<svg" in page
        assert "tokens/s" in page


def test_nothing_is_started_or_imported_that_computes() -> None:
    from subprocess import run
    from sys import executable

    code = "import sys, isthmus.plan.planner, isthmus.cli.main; sys.exit('torch' in sys.modules)"
    assert run([executable, "-c", code], check=False).returncode == 0


def test_a_mistake_is_one_sentence(job_file: Path) -> None:
    result = invoke(job_file, "--set", "cloud.east.accelerator=abacus")
    assert isinstance(result.exception, UserError)
    assert "not in the catalogue" in result.exception.message


def test_what_is_not_measured_is_said_with_the_command_that_measures_it(job_file: Path) -> None:
    result = invoke(job_file, "--set", "strategy.kind=pipeline")
    assert "the speed of east and of west is of the catalogue" in result.output
    assert f"isthmus profile {job_file} --cloud east" in result.output
    assert "a step would be shorter if one resource were unlimited:" in result.output


def test_a_measured_cloud_is_told_from_one_of_the_catalogue(job_file: Path, tmp_path: Path) -> None:
    one = PassTimes(forward_s=0.01, backward_s=0.02)
    sample = Sample(
        num_sequences=1,
        sequence_length=1024,
        precision=Precision.BFLOAT16,
        embedding=one,
        layers=(one,) * 12,
        head=one,
    )
    path = tmp_path / "east.profile.json"
    path.write_text(write_profile(Profile(device="mine", model_type="llama", samples=(sample,))))
    result = invoke(job_file, "--set", "strategy.kind=pipeline", "--set", f"cloud.east.profile={path}")
    assert "the speed of west is of the catalogue" in result.output


def test_clouds_that_take_no_part_are_named(job_file: Path) -> None:
    chosen = ("strategy.kind=pipeline", "strategy.clouds=['east']")
    result = invoke(job_file, *(word for one in chosen for word in ("--set", one)))
    assert "a run uses every cloud of its job: to run this plan, leave west out" in result.output


def test_a_misspelt_key_of_the_model_is_refused(job_file: Path) -> None:
    with pytest.raises(JobError) as caught:
        CliRunner().invoke(
            app, ["plan", str(job_file), "--set", "model.config.hiden_size=64"], catch_exceptions=False
        )
    (problem,) = caught.value.problems
    assert "the configuration of llama has no key 'hiden_size'" in str(problem)
    assert "did you mean 'hidden_size'?" in str(problem)
