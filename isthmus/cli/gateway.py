"""`isthmus gateway`: hold a cloud's one port and show which ranks stand behind it."""

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.options import JobArgument, JsonOption, SetOption

if TYPE_CHECKING:
    from isthmus.job import Address, CloudSpec, Job
    from isthmus.wan.relays.gateway import RankChange
    from isthmus.wan.trust.certificates import Identity

Say = Callable[[str, Mapping[str, object]], None]


def gateway(
    job: JobArgument,
    cloud: Annotated[str, typer.Option(metavar="NAME", help="The cloud whose port this is.")],
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Where to listen, if not at `listen`; 0.0.0.0 for all interfaces."
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a cloud's one port: pass what comes for a rank on to it, still encrypted, until stopped.

    The ranks of the cloud find the gateway by `gateway` of the job, or `listen`, and register by themselves.
    """
    from isthmus.errors import UserError
    from isthmus.job import load_job
    from isthmus.wan.trust.certificates import read_identity

    loaded = load_job(job, overrides=overrides or ())
    spec = loaded.cloud_named(cloud)
    if spec.listen is None:
        raise UserError(
            f"cloud {cloud!r} has no `listen`: it only dials out and needs no gateway",
            hint=f"give cloud {cloud!r} a `listen` in {job} if others shall reach it",
        )
    identity = read_identity(Path(spec.certificates), cloud)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    place = _place(bind, spec.listen)
    asyncio.run(_serve(loaded, spec, identity, place, _say_json if as_json else _say_text))


async def _serve(
    job: "Job", spec: "CloudSpec", identity: "Identity", place: tuple[str, int], say: Say
) -> None:
    from isthmus.wan.endpoint import num_connections
    from isthmus.wan.relays.gateway import Gateway

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    served = Gateway(
        identity=identity,
        num_ranks=spec.ranks,
        num_expected=spec.ranks * num_connections(job, spec.name),
        on_change=partial(_tell, spec, say),
    )
    try:
        address = await served.start(*place)
        say(f"gateway of {spec.name} listens at {address}", {"event": "listening", "address": str(address)})
        await stop.wait()
    finally:
        await served.close()


def _tell(spec: "CloudSpec", say: Say, change: "RankChange") -> None:
    facts = {"rank": change.rank, "num_registered": change.num_registered, "num_ranks": spec.ranks}
    count = f"{change.num_registered} of {spec.ranks} ranks"
    if change.address is None:
        say(f"rank {change.rank} left ({count})", {"event": "left", **facts})
    else:
        registered = {"event": "registered", "address": str(change.address), **facts}
        say(f"rank {change.rank} registered at {change.address} ({count})", registered)


def _place(bind: str | None, listen: "Address") -> tuple[str, int]:
    """Return the host, empty for all interfaces, and the port to bind."""
    from isthmus.errors import UserError
    from isthmus.job import parse_address
    from isthmus.wan.endpoint import listening_host

    if bind is None:
        return listening_host(listen), listen.port
    has_port = ":" in bind and not bind.endswith("]")
    try:
        address = parse_address(bind if has_port else f"{bind}:{listen.port}")
    except ValueError as error:
        raise UserError(f"--bind: {error}", hint="such as --bind 10.0.0.5 or --bind 10.0.0.5:7600") from None
    return address.host, address.port


def _say_text(text: str, _: Mapping[str, object]) -> None:
    typer.echo(text)


def _say_json(_: str, facts: Mapping[str, object]) -> None:
    typer.echo(json.dumps(facts))
