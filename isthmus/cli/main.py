"""The `isthmus` command: its verbs, and the one place that turns errors into messages and exit codes."""

import os
import pkgutil
import sys
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from isthmus import __version__
from isthmus.errors import IsthmusError, JobError, UserError

# The packages of the extra `train`.
_FOR_TRAINING: Final = frozenset({"huggingface_hub", "safetensors", "tokenizers", "torch", "transformers"})
_VERBS: Final = {
    "run": "run:run",
    "plan": "plan:plan",
    "simulate": "simulate:simulate",
    "probe": "probe:probe",
    "profile": "probe:profile",
    "gateway": "site:gateway",
    "doctor": "site:doctor",
    "report": "report:report",
    "checkpoints": "checkpoints:checkpoints",
    "export": "checkpoints:export",
    "schema": "output:schema",
    "certs": "site:certs_app",
}
"""The module of `isthmus.cli` and the name in it by verb."""


class _Verbs(TyperGroup):
    """Imports the module of a command when the command is called, since some modules take long to import."""

    def list_commands(self, ctx: object) -> list[str]:  # noqa: ARG002 click's signature
        return list(_VERBS)

    def get_command(self, ctx: object, cmd_name: str) -> Any:  # noqa: ARG002 click's signature
        if cmd_name not in _VERBS:
            return None
        verb = pkgutil.resolve_name(f"isthmus.cli.{_VERBS[cmd_name]}")
        if not isinstance(verb, typer.Typer):
            verb, function = typer.Typer(add_completion=False, rich_markup_mode="markdown"), verb
            verb.command(cmd_name)(function)
        return typer.main.get_command(verb)


app = typer.Typer(
    name="isthmus",
    cls=_Verbs,
    help="Train one language model on several clouds joined by slow links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"isthmus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the release.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a user's mistake exits with 2, a failure with 1, neither with a traceback."""
    # Errors of TLS and sockets are told in our words; gRPC's own lines would come in between.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app(prog_name="isthmus")
    except IsthmusError as error:
        show_error(error)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _FOR_TRAINING:
            raise
        hint = "in the clone of isthmus: pip install '.[train]'; plan, simulate and probe work without it"
        show_error(UserError(f"this command needs {package}, which is not installed here", hint=hint))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def show_error(error: IsthmusError) -> None:
    """Print one sentence, the place, and the cure, on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {_plain(error.message)}")
    if isinstance(error, JobError):
        for problem in error.problems:
            console.print(f"  [bold]{_plain(problem.key)}[/]: {_plain(problem.what)}")
            if problem.cure:
                console.print(f"    [green]cure:[/] {_plain(problem.cure)}")
    if error.hint:
        console.print(f"  [green]cure:[/] {_plain(error.hint)}")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
