"""`isthmus simulate` as a user runs it, on the plan of a pipeline."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from isthmus.cli.simulate import simulate
from isthmus.errors import JobError, UserError
from isthmus.plan.scenario import Scenario, scenario_to_dict
from tests.plan.scenarios import pipeline

SCENARIO = pipeline(2, 8, serialise_s=0.5, latency_s=1.0)
FAULTS = """
[[fault]]
at = "100 s"
kind = "cut"
between = ["cloud0", "cloud1"]
duration = "5 s"

[[fault]]
at = "150 s"
kind = "gone"
cloud = "cloud1"
"""


def invoke(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "100"})


def write_plan(folder: Path, scenario: Scenario | None = SCENARIO) -> Path:
    path = folder / "plan.json"
    values = None if scenario is None else scenario_to_dict(scenario)
    path.write_text(json.dumps({"version": 1, "scenario": values, "estimate": {}}))
    return path


def test_steps_traffic_and_a_picture_are_printed(tmp_path: Path) -> None:
    result = invoke(write_plan(tmp_path), "--steps", 3)
    assert result.exit_code == 0, result.output
    for words in ("0░", "▓", "takes", "bubble of cloud1", "in flight", "cloud0-cloud1", "11.44 MiB"):
        assert words in result.output


def test_json_has_every_step_and_what_each_fault_costs(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(FAULTS)
    result = invoke(write_plan(tmp_path), "--steps", 9, "--faults", faults, "--json")
    found = json.loads(result.stdout)
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4]
    assert found["stopped"]["step"] == 5
    cut, gone = found["faults"]
    assert cut["cost_s"] > 5.0
    assert gone["ends_the_run"]
    assert found["stopped"]["lost_s"] == 150.0


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(FAULTS)
    output = " ".join(invoke(write_plan(tmp_path), "--steps", 9, "--faults", faults).output.split())
    assert "cloud cloud1 is lost at 2.5 min, in step 5" in output
    assert "2.5 min of work are lost" in output
    assert "stops the run until it returns" in output


def test_pictures_are_written_where_asked(tmp_path: Path) -> None:
    svg, html = tmp_path / "one.svg", tmp_path / "one.html"
    result = invoke(write_plan(tmp_path), "--svg", svg, "--html", html)
    assert result.exit_code == 0, result.output
    assert svg.read_text().startswith("<svg")
    assert "<svg" in html.read_text()
    assert "<table>" in html.read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--set", "seed=1"), "--set changes a job"),
        (("--faults", "no-such-file.toml"), "there is no file no-such-file.toml"),
        (("--svg", "no-such-folder/one.svg"), "no-such-folder/one.svg cannot be written"),
    ],
)
def test_mistakes_are_one_sentence_and_the_cure(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    error = invoke(write_plan(tmp_path), *options).exception
    assert isinstance(error, UserError)
    assert sentence in error.message
    assert error.hint


def test_a_plan_that_is_no_pipeline_or_no_plan_is_refused(tmp_path: Path) -> None:
    for path, words in ((write_plan(tmp_path, None), "no pipeline"), (tmp_path / "none.json", "no file")):
        error = invoke(path).exception
        assert isinstance(error, UserError)
        assert words in error.message


def test_faults_name_clouds_of_the_plan(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nat = "1 s"\nkind = "gone"\ncloud = "west"\n')
    error = invoke(write_plan(tmp_path), "--faults", faults).exception
    assert isinstance(error, JobError)
    assert "no cloud 'west'" in error.problems[0].what
