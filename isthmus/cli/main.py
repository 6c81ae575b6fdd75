"""The `isthmus` command: its verbs, and the one place that turns errors into messages and exit codes."""

import os
import sys
from typing import Annotated, Final

import typer
from rich.console import Console

from isthmus import __version__
from isthmus.cli.checkpoints import checkpoints, export
from isthmus.cli.output import print_json
from isthmus.cli.plan import plan
from isthmus.cli.probe import probe, profile
from isthmus.cli.report import report
from isthmus.cli.run import run
from isthmus.cli.simulate import simulate
from isthmus.cli.site import certs_app, doctor, gateway
from isthmus.errors import IsthmusError, JobError, UserError
from isthmus.job import job_schema

# The packages of the extra `train`.
_FOR_TRAINING: Final = frozenset({"huggingface_hub", "safetensors", "tokenizers", "torch", "transformers"})

app = typer.Typer(
    name="isthmus",
    help="Train one language model on several clouds joined by slow links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def schema() -> None:
    """Print the JSON schema of a job file, for editors that complete and check it.

    Example: `isthmus schema > job.schema.json`
    """
    print_json(job_schema())


for _verb in (run, plan, simulate, probe, profile, gateway, doctor, report, checkpoints, export, schema):
    app.command()(_verb)
app.add_typer(certs_app, name="certs")


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
