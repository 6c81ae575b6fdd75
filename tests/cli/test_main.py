"""What the command itself says, whatever the verb."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from isthmus import __version__
from isthmus.cli import main as cli
from isthmus.cli.main import app
from isthmus.job.spec import job_schema


def test_the_release_is_told_and_nothing_is_run() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"isthmus {__version__}\n"


def test_the_first_lines_of_help_say_what_it_is_for() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "Train one language model on several clouds" in result.output


def test_the_schema_is_printed_as_json() -> None:
    assert json.loads(CliRunner().invoke(app, ["schema"]).stdout) == job_schema()


def commands() -> list[list[str]]:
    found = []
    group: Any = get_command(app)
    for name in group.list_commands(None):
        inner = getattr(group.get_command(None, name), "commands", None)
        found += [[name]] if inner is None else [[name, one] for one in inner]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_the_help_of_every_command_has_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Example: isthmus {' '.join(command)}" in result.output


def test_a_shell_completes_the_names_of_commands() -> None:
    asked = {"_ISTHMUS_COMPLETE": "complete_bash", "COMP_WORDS": "isthmus si", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "isthmus"], capture_output=True, text=True, env={**os.environ, **asked}
    )
    assert done.stdout.split() == ["simulate"]


MISTAKES = """
import contextlib, io, sys
SLOW = {"grpc", "cryptography", "numpy"}
from isthmus.cli.main import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["isthmus", *line.split()]
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            main()
        except SystemExit as ended:
            assert ended.code == 2, (line, ended.code)
    assert told.getvalue().strip(), line
    assert not {"torch", "transformers"} & sys.modules.keys(), line
    if line == "run bad.toml":
        assert not SLOW & sys.modules.keys(), line
"""
LINES = """
run bad.toml
run nowhere.toml
run job.toml --cloud moon
run job.toml --track tensorbord
run job.toml --faults nowhere.toml
run job.toml --cloud east --restarts 2
run job.toml --set train.stepps=3
plan bad.toml
plan job.toml --svg nowhere/plan.svg
simulate job.toml --steps 0
probe job.toml --cloud west
profile job.toml --cloud moon
gateway job.toml --cloud west
doctor bad.toml
report nowhere
checkpoints nowhere
export nowhere
certs show nowhere
"""


def test_mistakes_that_need_no_torch_are_told_before_it_is_imported(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "job.toml").write_text((root / "examples" / "two-clouds.toml").read_text())
    (tmp_path / "bad.toml").write_text("name = bad")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", MISTAKES]
    done = subprocess.run(
        command, input=LINES.strip(), capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr


def fails_for_want_of(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    def start(**_: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(cli, "app", start)


def test_what_a_plain_install_lacks_has_a_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_for_want_of(monkeypatch, "torch.distributed")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "needs torch, which is not installed here" in capsys.readouterr().err


def test_any_other_missing_module_is_a_bug_and_shows_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_for_want_of(monkeypatch, "isthmus.nowhere")
    with pytest.raises(ModuleNotFoundError):
        cli.main()
