"""The commands of an operator at one site: `isthmus certs`, `isthmus doctor` and `isthmus gateway`."""

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from typer import Argument, Option

from isthmus.cli import output
from isthmus.cli.output import print_json
from isthmus.errors import UserError
from isthmus.job import Address, CloudSpec, Job, load_job, stage_order
from isthmus.job.fields import parse_address

if TYPE_CHECKING:
    from isthmus.wan.certificates import CertificateFacts, Identity
    from isthmus.wan.doctor import CheckResult, Devices
    from isthmus.wan.gateway import RankChange

certs_app = typer.Typer(
    name="certs",
    help="Make and show the certificates by which clouds identify each other.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)

Folder = Annotated[Path, Option(metavar="FOLDER", help="The folder of keys and certificates.")]
Force = Annotated[bool, Option("--force", help="Replace the key that is there.")]


@certs_app.command()
def authority(folder: Folder = Path("certs"), force: Force = False) -> None:
    """Make the authority that signs the certificates of all clouds; the operator does this once.

    Example: `isthmus certs authority`
    """
    from isthmus.wan.certificates import make_authority

    certificate = make_authority(folder, force=force)
    typer.echo(f"✓ {certificate}, give it to every cloud")
    typer.echo(f"✓ {folder / 'authority.key'}, keep it here: whoever has it can pose as any cloud")
    _next("in each cloud, isthmus certs request CLOUD")


@certs_app.command()
def request(
    cloud: Annotated[str, Argument(metavar="CLOUD", help="The cloud's name in the job.")],
    folder: Folder = Path("certs"),
    force: Force = False,
) -> None:
    """Make the key and the signing request of a cloud; run this in that cloud.

    Example: `isthmus certs request west`
    """
    from isthmus.wan.certificates import key_fingerprint, make_request

    path = make_request(folder, cloud, force=force)
    typer.echo(f"✓ {folder / f'{cloud}.key'}, keep it here")
    typer.echo(f"✓ {path}, with the key {key_fingerprint(path)}")
    _next(f"send {path} to the operator, who runs: isthmus certs sign {path.name} --cloud {cloud}")


@certs_app.command()
def sign(
    request: Annotated[Path, Argument(help="The request that the cloud sent.", metavar="REQUEST.csr")],
    cloud: Annotated[str, Option(metavar="NAME", help="The cloud that sent it, as you know.")],
    days: Annotated[int, Option(help="How long the certificate is valid.", min=1, max=3650)] = 365,
    folder: Folder = Path("certs"),
) -> None:
    """Sign the request of a cloud; the operator does this, and again to renew.

    Example: `isthmus certs sign west.csr --cloud west --days 90`
    """
    from isthmus.wan.certificates import key_fingerprint, sign_request

    path = sign_request(request, cloud=cloud, folder=folder, days=days)
    typer.echo(f"✓ {path}, valid {days} days, for the key {key_fingerprint(request)}")
    if (folder / f"{cloud}.key").exists():
        _next(f"isthmus certs show {folder}")
    else:
        _next(f"send {path} and {folder / 'authority.crt'} to {cloud}, into the folder of {cloud}.key")


@certs_app.command()
def show(
    folder: Annotated[Path, Argument(help="The folder of keys and certificates.")] = Path("certs"),
    as_json: output.JsonOption = False,
) -> None:
    """Show the keys and certificates of a folder, how long they are valid, and what is wrong with them.

    Example: `isthmus certs show certs`
    """
    from isthmus.wan.certificates import inspect_folder

    facts = inspect_folder(folder)
    if as_json:
        print_json([{**asdict(fact), "expires": fact.expires and fact.expires.isoformat()} for fact in facts])
    else:
        _print_facts(facts)
    if any(fact.problem for fact in facts):
        raise typer.Exit(1)


def _print_facts(facts: "tuple[CertificateFacts, ...]") -> None:
    columns: dict[str, Callable[[CertificateFacts], str]] = {
        "name": lambda fact: fact.name.replace("[", r"\["),
        "kind": lambda fact: fact.kind,
        "expires": lambda fact: f"{fact.expires:%Y-%m-%d %H:%M} UTC" if fact.expires else "–",
        "days left": lambda fact: "–" if fact.days_left is None else str(fact.days_left),
        "": lambda fact: "[red]✗[/]" if fact.problem else "[green]✓[/]",
    }
    output.print_tables(Console(highlight=False), [output.tabulate(facts, columns)])
    for fact in facts:
        if fact.problem:
            typer.echo(f"✗ {fact.name}: {fact.problem}\n  cure: {fact.cure}")


def _next(text: str) -> None:
    typer.secho(f"next: {text}", dim=True)


_RUNS: Final = Path("runs")
_MARKS: Final = {
    "ok": ("✓", "green"),
    "note": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "red"),
}


def doctor(
    job: output.JobArgument,
    cloud: output.CloudOption = None,
    overrides: output.SetOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Check that this machine is ready to run the job.

    Example: `isthmus doctor job.toml --cloud west`
    """
    from isthmus.wan.doctor import CheckVerdict, examine

    loaded = load_job(job, overrides=overrides or ())
    here = loaded.cloud_named(cloud) if cloud is not None else None
    findings = []
    ready = examine(loaded, here, find_devices=find_devices, runs=_RUNS)
    for finding in chain(ready, _examine_inputs(loaded, cloud)):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print_sum(findings, job, cloud)
    if any(finding.verdict is CheckVerdict.FAILED for finding in findings):
        raise typer.Exit(1)


def _examine_inputs(job: Job, cloud: str | None) -> "Iterator[CheckResult]":
    """Check that this machine can read the model, and in the first cloud the data."""
    from isthmus.wan.doctor import check_by

    if job.model is None or job.data is None or find_spec("torch") is None:
        return
    from isthmus.train.runs import look_at_data, look_at_model

    yield check_by("model", look_at_model, job)
    if cloud in (None, stage_order(job)[0]):
        yield check_by("data", look_at_data, job)


def find_devices() -> "Devices":
    """Return what torch finds on this machine."""
    try:
        from isthmus.train.runs import find_devices as ask_torch

        return ask_torch()
    except (ImportError, OSError, RuntimeError) as error:
        from isthmus.wan.doctor import Devices

        return Devices(problem=str(error))


def _print(finding: "CheckResult") -> None:
    mark, colour = _MARKS[finding.verdict]
    typer.echo(f"{typer.style(mark, fg=colour)} {finding.name}: {finding.what}")
    if finding.cure is not None:
        typer.echo(f"  {'next' if finding.verdict == 'note' else 'cure'}: {finding.cure}")


def _print_sum(findings: "Sequence[CheckResult]", job: Path, cloud: str | None) -> None:
    num_failed = sum(finding.verdict == "failed" for finding in findings)
    if num_failed:
        typer.secho(f"next: repair what is marked ✗ ({num_failed}), then run isthmus doctor again", dim=True)
    else:
        here = "" if cloud is None else f" --cloud {cloud}"
        typer.secho(f"next: isthmus probe {job}{here}", dim=True)


Say = Callable[[str, Mapping[str, object]], None]


def gateway(
    job: output.JobArgument,
    cloud: Annotated[str, Option(metavar="NAME", help="The cloud that this port belongs to.")],
    bind: Annotated[
        str | None, Option(metavar="HOST[:PORT]", help="The address to listen at; 0.0.0.0: all interfaces.")
    ] = None,
    overrides: output.SetOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Forward connections from a cloud's one open port to its ranks, until stopped.

    What is forwarded stays encrypted. The ranks find the gateway at the job's `gateway` (`listen` unless
    given) and register by themselves.

    Example: `isthmus gateway job.toml --cloud east --bind 0.0.0.0`
    """
    from isthmus.wan.certificates import read_identity

    loaded = load_job(job, overrides=overrides or ())
    spec = loaded.cloud_named(cloud)
    if spec.listen is None:
        raise UserError(
            f"cloud {cloud!r} has no `listen`: it only dials out and needs no gateway",
            hint=f"give cloud {cloud!r} a `listen` in {job} if others shall reach it",
        )
    identity = read_identity(Path(spec.certificates), cloud)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    def say(text: str, facts: Mapping[str, object]) -> None:
        typer.echo(json.dumps(facts) if as_json else text)

    _serve(loaded, spec, identity, _place(bind, spec.listen), say)


def _serve(job: Job, spec: CloudSpec, identity: "Identity", place: tuple[str, int], say: Say) -> None:
    from isthmus.wan.endpoint import num_connections
    from isthmus.wan.gateway import Gateway

    def tell(change: "RankChange") -> None:
        facts = {"rank": change.rank, "num_registered": change.num_registered, "num_ranks": spec.ranks}
        event = "left" if change.address is None else "registered"
        where = {} if change.address is None else {"address": str(change.address)}
        at = "".join(f" at {address}" for address in where.values())
        count = f"{change.num_registered} of {spec.ranks} ranks"
        say(f"rank {change.rank} {event}{at} ({count})", {"event": event, **where, **facts})

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    num_expected = spec.ranks * num_connections(job, spec.name)
    with Gateway(
        *place, identity=identity, num_ranks=spec.ranks, num_expected=num_expected, on_change=tell
    ) as served:
        facts = {"event": "listening", "address": str(served.address)}
        say(f"gateway of {spec.name} listens at {served.address}", facts)
        stop.wait()


def _place(bind: str | None, listen: Address) -> tuple[str, int]:
    """Return the host, empty for all interfaces, and the port to bind."""
    from isthmus.wan.endpoint import listening_host

    if bind is None:
        return listening_host(listen), listen.port
    has_port = ":" in bind and not bind.endswith("]")
    try:
        address = parse_address(bind if has_port else f"{bind}:{listen.port}")
    except ValueError as error:
        raise UserError(f"--bind: {error}", hint="such as --bind 10.0.0.5 or --bind 10.0.0.5:7600") from None
    return address.host, address.port
