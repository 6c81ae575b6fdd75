"""`isthmus report` on run directories as workers leave them."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.testing import CliRunner

from isthmus.cli.main import app as isthmus
from isthmus.cli.output import print_tables
from isthmus.cli.report import report
from isthmus.errors import UserError
from isthmus.events import EventLog
from isthmus.observe.draw import Table
from isthmus.plan.simulated import simulate_scenario
from tests.observe.test_compare import SCENARIO, write_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "data-parallel.toml"


def invoke(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "120"})


def test_measured_beside_predicted_and_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, simulate_scenario(SCENARIO, num_steps=4), slower=1.25)
    result = invoke(run)
    assert result.exit_code == 0, result.output
    for words in ("-20.0%", "forward cloud0", "gradients", "cloud1→cloud0"):
        assert words in result.output
    assert "saving" not in result.output
    page = (run / "report.html").read_text()
    assert page.index(">predicted<") < page.index(">measured<")
    assert page.count("<svg") == 3
    assert "Loss" in page


def test_a_run_without_plan_reports_what_was_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path, simulate_scenario(SCENARIO, num_steps=2), scenario=None)
    page = tmp_path / "elsewhere.html"
    result = invoke(run, "--html", page)
    assert result.exit_code == 0, result.output
    assert "no plan.json" in result.output
    assert page.read_text().count("<svg") == 2
    assert not (run / "report.html").exists()


def test_json_is_all_of_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, simulate_scenario(SCENARIO, num_steps=4), slower=2.0)
    found = json.loads(invoke(run, "--json").stdout)
    assert {one["error"] for one in found["durations"] if one["kind"] == "forward"} == {-0.5}
    assert found["step"]["error"] == -0.5
    assert [one["cloud"] for one in found["waits"]["measured"]] == ["cloud0", "cloud1"]
    assert len(found["losses"]) == 4


def data_run(folder: Path, losses: dict[int, float], contents: dict[str, list[str]]) -> Path:
    """The events of a run of data parallel, with the job of the example."""
    with EventLog(folder / "events" / "east.jsonl") as log:
        for step, loss in losses.items():
            log.fact("evaluation", {"step": step, "loss": loss})
    for cloud, digests in contents.items():
        with EventLog(folder / "events" / f"{cloud}.jsonl") as log:
            for number, content in enumerate(digests):
                counts = {"live": 2, "participating": 2, "averaged": 1 + number % 2}
                log.fact("round", {"number": number, **counts, "content": content})
    shutil.copy(EXAMPLE, folder / "job.toml")
    return folder


def test_validation_losses_of_two_runs_after_equal_tokens(tmp_path: Path) -> None:
    contents = {"east": ["a", "b"], "west": ["a", "c"]}
    run = data_run(tmp_path / "run", {40: 4.0, 80: 3.03, 120: 2.5}, contents)
    alone = data_run(tmp_path / "alone", {80: 3.0, 160: 2.0}, {})
    shown = invoke(run, "--beside", alone).output
    for words in ("327,680", "3.0300", "3.0000", "+1.00%", "unlike parameters after"):
        assert words in shown
    found = json.loads(invoke(run, "--beside", alone, "--json").stdout)
    assert [one["num_tokens"] for one in found["quality"]] == [80 * 4096]
    expected = {"num_rounds": 2, "live": 2.0, "participating": 2.0, "averaged": 1.5, "num_unlike": 1}
    assert found["rounds"] == expected


def test_runs_without_an_evaluation_after_equal_tokens_are_one_sentence(tmp_path: Path) -> None:
    run, other = (data_run(tmp_path / str(step), {step: 4.0}, {}) for step in (40, 41))
    error = invoke(run, "--beside", other).exception
    assert isinstance(error, UserError)
    assert "no evaluation after equal tokens" in error.message
    assert error.hint


def test_a_folder_without_events_is_one_sentence(tmp_path: Path) -> None:
    error = invoke(tmp_path).exception
    assert isinstance(error, UserError)
    assert error.hint


def test_the_help_names_the_folder() -> None:
    shown = CliRunner().invoke(isthmus, ["report", "--help"], env={"COLUMNS": "150"}).output
    assert "The folder of a run, runs/NAME/ID, or runs/NAME." in shown


def test_no_word_is_broken_on_a_narrow_terminal() -> None:
    header = ("cloud", "", "busy", "bubble", "data", "saving", "activations", "gradients", "other stages")
    row = ("frankfurt", "predicted", *("12.3%" for _ in header[2:]))
    for width in (80, 40):
        shown = Console(file=io.StringIO(), width=width)
        print_tables(shown, [Table(header=header, rows=(row,))])
        lines = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
        words = {word for one in (*header, *row) for word in one.split()}
        assert words == {word for line in lines for word in line.split()}
        assert width < 80 or all(len(line) <= width for line in lines)
