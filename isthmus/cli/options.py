"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated, Final

import typer

JobArgument = Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")]
CloudOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Be this one cloud, for real; without it all clouds run here."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job, such as link.0.rtt='60 ms'."),
]
ProfileOption = Annotated[
    bool,
    typer.Option(
        "--profile/--no-profile",
        help="Measure clouds on this machine that have no profile, for a few seconds, before planning.",
    ),
]
NO_EMULATED_WAN: Final = "--faults disturbs the emulated WAN, and with --cloud there is none"
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
