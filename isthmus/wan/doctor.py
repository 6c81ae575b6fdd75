"""Pre-flight: each check looks at one thing, tells what it sees, or raises what is wrong with its cure."""

import errno
import importlib.metadata
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from isthmus.errors import UserError
from isthmus.job import Address, CloudSpec, Job
from isthmus.units import format_bytes
from isthmus.wan.certificates import CertificateFacts, inspect_folder, read_identity
from isthmus.wan.sockets import own_address, try_to_bind


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What torch finds on this machine: a kind of accelerator and how many, or why it cannot tell."""

    kind: str | None = None
    num_devices: int = 0
    problem: str | None = None

    def __str__(self) -> str:
        return f"{self.num_devices} × {self.kind}" if self.num_devices else "cpu only"


def require_kind(cloud: CloudSpec, found: Devices) -> None:
    """Refuse a cloud whose `device` is not here."""
    if cloud.device == "cpu":
        return
    if found.problem is not None:
        raise UserError(
            f"cloud {cloud.name!r} cannot use torch here: {found.problem}",
            hint="install torch for this machine again",
        )
    if cloud.device not in ("auto", found.kind):
        raise UserError(
            f"cloud {cloud.name!r} asks for {cloud.device}, but torch finds {found} here",
            hint=f'set cloud.{cloud.name}.device to "{found.kind or "cpu"}" or "auto", '
            f"or install the driver and the torch build for {cloud.device}",
        )


def require_one_each(cloud: CloudSpec, found: Devices, *, num_ranks: int) -> None:
    """Refuse more ranks of a cloud on this machine than there are accelerators: each needs its own."""
    if cloud.device == "cpu" or not 0 < found.num_devices < num_ranks:
        return
    raise UserError(
        f"{num_ranks} ranks of cloud {cloud.name!r} here need a device each, but torch finds {found}",
        hint=f"start at most {found.num_devices} on this machine, or set cloud.{cloud.name}.ranks "
        f'to {found.num_devices} or its device to "cpu"',
    )


MIN_DAYS_LEFT = 30
MIN_FREE_BYTES = 20 * 2**30

_DIAL_TIMEOUT_S = 5.0
_MAX_STATUS_LINE_BYTES = 1024
# Bad gateway, service unavailable, gateway timeout: what a proxy says when it may connect but cannot.
_NO_ANSWER_BEHIND_PROXY = r"HTTP/1\.[01] 50[234]\b"


class CheckVerdict(StrEnum):
    """How a check came out; a note names what is still to be done, and is no fault."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What one check saw, and the cure unless all is well."""

    name: str
    verdict: CheckVerdict
    what: str
    cure: str | None = None


class Doubt(UserError):
    """What a check sees may be wrong, or is only to be noted: a run can start."""

    def __init__(self, what: str, *, hint: str | None, verdict: CheckVerdict = CheckVerdict.WARNING) -> None:
        super().__init__(what, hint=hint)
        self.verdict = verdict


def check_by(name: str, look: Callable[..., str], *arguments: object) -> CheckResult:
    """Check by looking: what is seen is told, and what is refused has its cure."""
    try:
        return CheckResult(name=name, verdict=CheckVerdict.OK, what=look(*arguments))
    except UserError as error:
        verdict = error.verdict if isinstance(error, Doubt) else CheckVerdict.FAILED
        cure = error.hint or "mend that, then run this again"
        return CheckResult(name=name, verdict=verdict, what=str(error), cure=cure)


def examine(
    job: Job, cloud: CloudSpec | None, *, find_devices: Callable[[], Devices], runs: Path
) -> Iterator[CheckResult]:
    """Yield the findings for one cloud of a job here, or without a cloud for what all of them share."""
    clouds = job.cloud if cloud is None else (cloud,)
    torch = check_by("torch", look_at_torch)
    yield torch
    if torch.verdict is CheckVerdict.OK:
        yield check_by("devices", look_at_devices, job, cloud, find_devices)
    is_known = True
    if cloud is not None:
        yield from _examine_network(job, cloud)
        identity = check_by(f"identity of {cloud.name}", look_at_identity, cloud)
        is_known = identity.verdict is not CheckVerdict.FAILED
        yield identity
    for fact in _certificate_facts(clouds) if is_known else ():
        name = "authority" if fact.kind == "authority" else f"certificate of {fact.name}"
        yield check_by(name, look_at_certificate, fact)
    yield check_by("disk", look_at_disk, runs)


def look_at_torch() -> str:
    """Look at the installed version of torch, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("not installed", hint="install the package with its extra [train]") from None


def look_at_devices(job: Job, cloud: CloudSpec | None, find_devices: Callable[[], Devices]) -> str:
    """Look for the accelerators of a cloud, or of all, as a run without --cloud asks for."""
    clouds = job.cloud if cloud is None else (cloud,)
    if all(one.device == "cpu" for one in clouds):
        return "cpu"
    found = find_devices()
    if cloud is not None:
        require_kind(cloud, found)
    try:
        for one in clouds:
            require_kind(one, found)
            require_one_each(one, found, num_ranks=one.ranks)
    except UserError as error:
        raise Doubt(
            error.message, hint=f"fine if the cloud has other machines; otherwise {error.hint}"
        ) from None
    return str(found)


def look_at_port(listen: Address) -> str:
    """Look whether the cloud's gateway can take its port here, and tell where it will be open."""
    host = own_address(listen.host)
    try:
        try_to_bind(host or ("::" if ":" in listen.host else ""), listen.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = "fine if this is the cloud's gateway; otherwise end that program or change `listen`"
            raise Doubt(f"a program here listens on {listen.port} already", hint=hint) from None
        hint = "choose another port for `listen`, above 1023"
        raise UserError(f"{listen.port} cannot be taken: {error.strerror}", hint=hint) from None
    return f"{listen.port} is free here, at {host or 'all interfaces'}"


def look_at_peer(peer: CloudSpec, address: Address, proxy: Address | None) -> str:
    """Open a TCP connection to a peer's address, through the proxy if there is one.

    A host that answers that nothing listens there is well: the other site has just not started yet.
    """
    first, cure = proxy or address, "start the proxy, or correct `proxy` in the job"
    if proxy is None:
        cure = (
            f"correct the host name in the job, or let the firewalls here and at {peer.name} pass this port"
        )
    try:
        with socket.create_connection((first.host, first.port), timeout=_DIAL_TIMEOUT_S) as connection:
            refusal = _ask_proxy(connection, address) if proxy else None
    except OSError as error:
        if isinstance(error, ConnectionRefusedError) and proxy is None:
            raise _nothing_listens(peer, str(address)) from None
        reason = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise UserError(f"{first}: {reason}", hint=cure) from None
    if refusal is not None:
        what = f"the proxy {proxy} answers {refusal!r} for {address}"
        if re.match(_NO_ANSWER_BEHIND_PROXY, refusal):
            raise _nothing_listens(peer, what)
        raise UserError(what, hint=f"let the proxy allow CONNECT to {address}")
    return f"{address} through the proxy {proxy}" if proxy else str(address)


def look_at_identity(cloud: CloudSpec) -> str:
    """Look whether the cloud can show who it is, by a key that is private."""
    folder = Path(cloud.certificates)
    read_identity(folder, cloud.name)
    key = folder / f"{cloud.name}.key"
    if key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise Doubt(f"every user of this machine can read {key}", hint=f"chmod 600 {key}")
    return f"{key} and its certificate belong together"


def look_at_certificate(fact: CertificateFacts) -> str:
    """Look whether a certificate is sound and will not soon expire."""
    if fact.problem is not None or fact.days_left is None:
        raise UserError(fact.problem or "unreadable", hint=fact.cure)
    left = f"{fact.days_left} days left"
    if fact.days_left < MIN_DAYS_LEFT:
        renewal = f"renew it: isthmus certs sign {fact.name}.csr --cloud {fact.name}"
        new = "make a new authority and sign every cloud again"
        raise Doubt(left, hint=f"let the operator {new if fact.kind == 'authority' else renewal}")
    return left


def look_at_disk(runs: Path) -> str:
    """Look at the space that is left where runs are written."""
    existing = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    what = f"{format_bytes(free_bytes)} free for {runs}"
    if free_bytes < MIN_FREE_BYTES:
        hint = f"free some space, or start where {format_bytes(MIN_FREE_BYTES)} are free"
        raise Doubt(what, hint=hint)
    return what


def _examine_network(job: Job, cloud: CloudSpec) -> Iterator[CheckResult]:
    if cloud.listen is None:
        yield check_by("port", lambda: f"none needed, {cloud.name} only dials out")
    else:
        yield check_by("port", look_at_port, cloud.listen)
    for link in job.links_of(cloud.name):
        peer = job.listener(link)
        if peer.name != cloud.name:
            yield check_by(f"reach {peer.name}", look_at_peer, peer, peer.listen, cloud.proxy)


def _ask_proxy(connection: socket.socket, address: Address) -> str | None:
    """Return the proxy's status line if it refuses to connect us to an address."""
    connection.sendall(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    with connection.makefile("rb") as answer:
        status = answer.readline(_MAX_STATUS_LINE_BYTES).decode("latin-1").strip()
    return None if re.match(r"HTTP/1\.[01] 2\d\d\b", status) else status


def _nothing_listens(peer: CloudSpec, where: str) -> Doubt:
    # One rank that names no gateway holds the port itself.
    verb = "gateway" if peer.ranks > 1 or peer.gateway != peer.listen else "run"
    return Doubt(
        f"{where}: nothing listens there yet",
        hint=f"start the other site when this one is ready: isthmus {verb} JOB --cloud {peer.name}",
        verdict=CheckVerdict.NOTE,
    )


def _certificate_facts(clouds: Sequence[CloudSpec]) -> list[CertificateFacts]:
    """Return the facts on these clouds and their authorities, from those of their folders that are here."""
    folders = sorted({Path(cloud.certificates) for cloud in clouds})
    names = {"authority", *(cloud.name for cloud in clouds)}
    found = (fact for folder in folders if os.access(folder, os.R_OK) for fact in inspect_folder(folder))
    return [fact for fact in found if fact.name in names]
