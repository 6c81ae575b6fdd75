"""What the command itself says, whatever the verb."""

import pytest
from typer.testing import CliRunner

from isthmus import __version__
from isthmus.cli import main as cli
from isthmus.cli.main import app


def test_the_release_is_told_and_nothing_is_run() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"isthmus {__version__}\n"


def test_the_first_lines_of_help_say_what_it_is_for() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "Train one language model on several clouds" in result.output


def fails_for_want_of(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    def start() -> None:
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
