"""`isthmus certs`: make the authority, ask for a cloud's certificate, sign it, show what is there."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from isthmus.wan.trust.certificates import CertificateFacts

certs_app = typer.Typer(
    name="certs",
    help="Make and show the certificates by which clouds know each other.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Option(metavar="FOLDER", help="Where keys and certificates are.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the key that is there.")]


@certs_app.command()
def authority(folder: Folder = Path("certs"), force: Force = False) -> None:
    """Make the authority, once, at the operator who vouches for all clouds."""
    from isthmus.wan.trust.certificates import make_authority

    certificate = make_authority(folder, force=force)
    typer.echo(f"✓ {certificate}, for every cloud to have")
    typer.echo(f"✓ {folder / 'authority.key'}, to stay here: who has it can pose as any cloud")
    _next("in each cloud, isthmus certs request CLOUD")


@certs_app.command()
def request(
    cloud: Annotated[str, typer.Argument(metavar="CLOUD", help="The cloud's name in the job.")],
    folder: Folder = Path("certs"),
    force: Force = False,
) -> None:
    """Make a cloud's key and signing request, in that cloud."""
    from isthmus.wan.trust.certificates import key_fingerprint, make_request

    path = make_request(folder, cloud, force=force)
    typer.echo(f"✓ {folder / f'{cloud}.key'}, to stay here")
    typer.echo(f"✓ {path}, with the key {key_fingerprint(path)}")
    _next(f"send {path} to the operator, who runs: isthmus certs sign {path.name} --cloud {cloud}")


@certs_app.command()
def sign(
    request: Annotated[Path, typer.Argument(help="The request that the cloud sent.", metavar="REQUEST.csr")],
    cloud: Annotated[str, typer.Option(metavar="NAME", help="The cloud that you know it came from.")],
    days: Annotated[int, typer.Option(help="How long the certificate is valid.", min=1, max=3650)] = 365,
    folder: Folder = Path("certs"),
) -> None:
    """Sign a cloud's request, at the operator; sign it again to renew."""
    from isthmus.wan.trust.certificates import key_fingerprint, sign_request

    path = sign_request(request, cloud=cloud, folder=folder, days=days)
    typer.echo(f"✓ {path}, valid {days} days, for the key {key_fingerprint(request)}")
    if (folder / f"{cloud}.key").exists():
        _next(f"isthmus certs show {folder}")
    else:
        _next(f"send {path} and {folder / 'authority.crt'} to {cloud}, into the folder of {cloud}.key")


@certs_app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where keys and certificates are.")] = Path(
        "certs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a folder holds, until when it is valid, and what is wrong with it."""
    from isthmus.wan.trust.certificates import inspect_folder

    facts = inspect_folder(folder, now=datetime.now(UTC))
    if as_json:
        typer.echo(json.dumps([asdict(fact) for fact in facts], default=datetime.isoformat, indent=2))
    else:
        _print_facts(facts)
    if any(fact.problem for fact in facts):
        raise typer.Exit(1)


def _print_facts(facts: tuple["CertificateFacts", ...]) -> None:
    from rich.console import Console

    Console(highlight=False).print(_table(facts))
    for fact in facts:
        if fact.problem:
            typer.echo(f"✗ {fact.name}: {fact.problem}\n  cure: {fact.cure}")


def _table(facts: tuple["CertificateFacts", ...]) -> "Table":
    from rich.table import Table

    table = Table("name", "kind", "expires", "days left", "", box=None, pad_edge=False)
    for fact in facts:
        table.add_row(
            fact.name.replace("[", r"\["),
            fact.kind,
            f"{fact.expires:%Y-%m-%d %H:%M} UTC" if fact.expires else "–",
            str(fact.days_left) if fact.days_left is not None else "–",
            "[red]✗[/]" if fact.problem else "[green]✓[/]",
        )
    return table


def _next(text: str) -> None:
    typer.secho(f"next: {text}", dim=True)
