"""`isthmus profile` as a user runs it."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from isthmus.cli.probe import profile
from isthmus.errors import UserError
from isthmus.plan.times import read_profile
from isthmus.train.profiling import Effort

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "demo.toml"
SMALL = ["--set", "data.sequence_length=16", "--set", "train.batch_tokens=256"]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typer.Typer:
    few = Effort(least_rounds=2, most_rounds=2, size_s=10.0, rehearsal_s=0.0)
    monkeypatch.setattr("isthmus.train.profiling.THOROUGH", few)
    monkeypatch.setattr("isthmus.train.profiling.MAX_SCATTER", 100.0)
    monkeypatch.chdir(tmp_path)
    one = typer.Typer()
    one.command()(profile)
    return one


def test_it_shows_a_table_and_writes_the_file(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(EXAMPLE), "--cloud", "east", *SMALL])
    assert result.exit_code == 0, result.output
    assert "1 × 16" in result.output
    assert "ns per parameter" in result.output
    assert 'profile = "east.profile.json"' in result.output
    assert read_profile(tmp_path / "east.profile.json").model_type == "llama"


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("isthmus.train.profiling.Rig")
    result = CliRunner().invoke(app, [str(EXAMPLE), "--cloud=east", "--out=nowhere/mine.json", *SMALL])
    assert isinstance(result.exception, UserError)
    assert result.exception.message == "nowhere/mine.json cannot be written"


def test_one_file_holds_one_cloud(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, [str(EXAMPLE), "--out", "mine.json", *SMALL])
    assert isinstance(result.exception, UserError)
    assert result.exception.message == "--out names one file, and the job has 2 clouds"
    assert result.exception.hint == "leave it out, or name the cloud with --cloud"


@pytest.mark.slow
def test_all_clouds_are_measured_together_and_have_a_file_each(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(EXAMPLE), "--json", *SMALL])
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)) == {"east", "west"}
    east, west = (read_profile(tmp_path / f"{name}.profile.json") for name in ("east", "west"))
    assert east.samples == west.samples
    assert east.num_sharing == 2


@pytest.mark.slow
def test_json_is_what_the_file_holds(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, [str(EXAMPLE), "--cloud", "west", "--out", "mine.json", "--json", *SMALL]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "mine.json").read_text())
