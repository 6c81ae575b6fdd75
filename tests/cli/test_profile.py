"""`isthmus profile` as a user runs it."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from isthmus.cli.profile import profile
from isthmus.errors import UserError
from isthmus.plan.costs.profile import read_profile

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "demo.toml"
SMALL = ["--set", "data.sequence_length=16", "--set", "train.batch_tokens=256"]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typer.Typer:
    monkeypatch.setattr("isthmus.train.profiling._NUM_REPEATS", 2)
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


def test_of_several_clouds_one_must_be_named(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, [str(EXAMPLE), *SMALL])
    assert isinstance(result.exception, UserError)
    assert result.exception.message == "the job has 2 clouds, and this machine stands for one of them"
    assert result.exception.hint == "say which: --cloud east or --cloud west"


def test_json_is_what_the_file_holds(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, [str(EXAMPLE), "--cloud", "west", "--out", "mine.json", "--json", *SMALL]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "mine.json").read_text())
