"""Pre-flight: each check looks at one thing and returns a finding; a finding that is not fine has a cure."""

import errno
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from isthmus.errors import CertificateError, UserError
from isthmus.job import Address, CloudSpec, Job
from isthmus.units import format_bytes
from isthmus.wan.certificates import CertificateFacts, inspect_folder, read_identity
from isthmus.wan.endpoint import num_connections
from isthmus.wan.sockets import num_files_left, own_address, try_to_bind


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


MIN_TORCH = (2, 6)
MIN_DAYS_LEFT = 30
MIN_FREE_BYTES = 20 * 2**30

_DIAL_TIMEOUT_S = 5.0
_COMMAND_TIMEOUT_S = 5.0
_MAX_STATUS_LINE_BYTES = 1024
# Bad gateway, service unavailable, gateway timeout: what a proxy says when it may connect but cannot.
_NO_ANSWER_BEHIND_PROXY = r"HTTP/1\.[01] 50[234]\b"
# What a process holds open besides its connections: libraries, logs, checkpoints.
_OTHER_OPEN_FILES = 256


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


def examine(
    job: Job, cloud: CloudSpec | None, *, find_devices: Callable[[], Devices], runs: Path, now: datetime
) -> Iterator[CheckResult]:
    """Yield the findings for one cloud of a job here, or without a cloud for what all of them share."""
    torch_version = _installed_version("torch")
    # It is new enough, since this file can be read.
    yield _ok("python", platform.python_version())
    yield check_torch(torch_version)
    if torch_version is not None:
        yield (check_devices(cloud, find_devices) if cloud else check_devices_of_all(job.cloud, find_devices))
    identity = None
    if cloud is not None:
        yield from _examine_network(job, cloud)
        yield (identity := check_identity(cloud, now=now))
    facts = _certificate_facts([cloud] if cloud else job.cloud, now=now)
    if identity is None or identity.verdict is not CheckVerdict.FAILED:
        yield from map(check_certificate, facts)
    yield check_clock(facts, is_synchronised=read_is_synchronised(), now=now)
    yield check_disk(runs)
    yield check_open_files(num_files_left(num_reserved=0), num_needed=_num_open_files(job, cloud))


def check_by(name: str, look: Callable[[], str]) -> CheckResult:
    """Check by looking: what is seen is told, and what is refused has its cure."""
    try:
        return _ok(name, look())
    except UserError as error:
        return _failed(name, str(error), error.hint or "mend that, then run this again")


def check_torch(version: str | None) -> CheckResult:
    """Check the installed version of torch, without importing it."""
    least = "{}.{}".format(*MIN_TORCH)
    cure = f"install torch {least} or newer, with the package's extra [train]"
    if version is None:
        return _failed("torch", "not installed", cure)
    is_old = tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_TORCH
    return _failed("torch", f"{version} is older than {least}", cure) if is_old else _ok("torch", version)


def check_devices(cloud: CloudSpec, find_devices: Callable[[], Devices]) -> CheckResult:
    """Check that the accelerators are here which the cloud is to have."""
    found = find_devices() if cloud.device != "cpu" else Devices()

    def look() -> str:
        require_kind(cloud, found)
        return "cpu" if cloud.device == "cpu" else str(found)

    finding = check_by("devices", look)
    if finding.verdict is CheckVerdict.OK and 0 < found.num_devices < cloud.ranks:
        cure = f"fine if {cloud.name} has further machines; otherwise set ranks = {found.num_devices}"
        return _warning("devices", f"{found} here, the cloud has {cloud.ranks} ranks", cure)
    return finding


def check_devices_of_all(clouds: Sequence[CloudSpec], find_devices: Callable[[], Devices]) -> CheckResult:
    """Check that all clouds could run on this machine, which only a run without --cloud asks for."""
    if all(cloud.device == "cpu" for cloud in clouds):
        return _ok("devices", "cpu")
    found = find_devices()
    try:
        for cloud in clouds:
            require_kind(cloud, found)
            require_one_each(cloud, found, num_ranks=cloud.ranks)
    except UserError as error:
        return _warning("devices", error.message, f"fine if the cloud runs elsewhere; otherwise {error.hint}")
    return _ok("devices", str(found))


def check_port(listen: Address) -> CheckResult:
    """Check that the cloud's gateway can take its port here, and tell where it will be open."""
    host = own_address(listen.host)
    try:
        try_to_bind(host or ("::" if ":" in listen.host else ""), listen.port)
    except OSError as error:
        return _taken(listen.port, error)
    return _ok("port", f"{listen.port} is free here, at {host or 'all interfaces'}")


def check_peer(peer: CloudSpec, address: Address, *, proxy: Address | None) -> CheckResult:
    """Check that a TCP connection to a peer's address opens, through the proxy if there is one.

    A host that answers that nothing listens there is well: the other site has just not started yet.
    """
    name, first = f"reach {peer.name}", proxy or address
    try:
        with socket.create_connection((first.host, first.port), timeout=_DIAL_TIMEOUT_S) as connection:
            refusal = _ask_proxy(connection, address) if proxy else None
    except ConnectionRefusedError:
        if proxy is None:
            return _nothing_listens(name, peer, str(address))
        return _failed(name, f"{proxy}: connection refused", "start the proxy, or correct `proxy` in the job")
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        return _failed(name, f"{first}: {reason}", _dial_cure(peer, error, proxy=proxy))
    if refusal is not None and re.match(_NO_ANSWER_BEHIND_PROXY, refusal):
        return _nothing_listens(name, peer, f"the proxy {proxy} answers {refusal!r} for {address}")
    if refusal is not None:
        cure = f"let the proxy allow CONNECT to {address}"
        return _failed(name, f"the proxy {proxy} answers {refusal!r} for {address}", cure)
    return _ok(name, f"{address} through the proxy {proxy}" if proxy else str(address))


def check_identity(cloud: CloudSpec, *, now: datetime) -> CheckResult:
    """Check that the cloud can show who it is, by a key that is private."""
    folder, name = Path(cloud.certificates), f"identity of {cloud.name}"
    try:
        read_identity(folder, cloud.name, now=now)
    except CertificateError as error:
        return _failed(name, error.message, error.hint)
    key = folder / f"{cloud.name}.key"
    if key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        return _warning(name, f"every user of this machine can read {key}", f"chmod 600 {key}")
    return _ok(name, f"{key} and its certificate belong together")


def check_certificate(fact: CertificateFacts, /) -> CheckResult:
    """Check that a certificate is sound and will not soon expire."""
    name = "authority" if fact.kind == "authority" else f"certificate of {fact.name}"
    if fact.problem is not None or fact.days_left is None:
        return _failed(name, fact.problem or "unreadable", fact.cure)
    left = f"{fact.days_left} days left"
    if fact.days_left >= MIN_DAYS_LEFT:
        return _ok(name, left)
    if fact.kind == "authority":
        return _warning(name, left, "let the operator make a new authority and sign every cloud again")
    return _warning(
        name, left, f"let the operator renew it: isthmus certs sign {fact.name}.csr --cloud {fact.name}"
    )


def check_clock(
    facts: Sequence[CertificateFacts], *, is_synchronised: bool | None, now: datetime
) -> CheckResult:
    """Check the clock against what was signed before now, and that a time service keeps it."""
    cure = "set the clock and let a time service keep it: timedatectl set-ntp true"
    starts = max((fact.starts for fact in facts if fact.starts), default=now)
    if now < starts:
        return _failed(
            "clock",
            f"{now:%Y-%m-%d %H:%M} UTC here is before {starts:%Y-%m-%d %H:%M} UTC of a certificate",
            cure,
        )
    if is_synchronised is None:
        return _ok("clock", "time service unknown; isthmus probe shows the offset to each peer")
    if not is_synchronised:
        return _warning("clock", "no time service keeps it", cure)
    return _ok("clock", "kept by a time service")


def check_disk(runs: Path) -> CheckResult:
    """Check the space that is left where runs are written."""
    existing = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    what = f"{format_bytes(free_bytes)} free for {runs}"
    if free_bytes >= MIN_FREE_BYTES:
        return _ok("disk", what)
    return _warning("disk", what, f"free some space, or start where {format_bytes(MIN_FREE_BYTES)} are free")


def check_open_files(limit: int, *, num_needed: int) -> CheckResult:
    """Check that a gateway of this job may hold all its connections open."""
    if limit >= num_needed:
        return _ok("open files", f"{limit} allowed")
    what = f"{limit} allowed, a gateway of this job may need {num_needed}"
    return _warning("open files", what, f"ulimit -n {num_needed}")


def read_is_synchronised() -> bool | None:
    """Return whether the system says that a time service keeps the clock, or None where it does not say."""
    command = shutil.which("timedatectl")
    if command is None:
        return None
    arguments = [command, "show", "--property=NTPSynchronized", "--value"]
    try:
        done = subprocess.run(  # noqa: S603 no part of the command comes from outside
            arguments, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"yes": True, "no": False}.get(done.stdout.strip())


def _examine_network(job: Job, cloud: CloudSpec) -> Iterator[CheckResult]:
    if cloud.listen is None:
        yield _ok("port", f"none needed, {cloud.name} only dials out")
    else:
        yield check_port(cloud.listen)
    for link in job.links_of(cloud.name):
        peer = job.listener(link)
        if peer.name != cloud.name and peer.listen is not None:
            yield check_peer(peer, peer.listen, proxy=cloud.proxy)


def _ask_proxy(connection: socket.socket, address: Address) -> str | None:
    """Return the proxy's status line if it refuses to connect us to an address."""
    connection.sendall(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    with connection.makefile("rb") as answer:
        status = answer.readline(_MAX_STATUS_LINE_BYTES).decode("latin-1").strip()
    return None if re.match(r"HTTP/1\.[01] 2\d\d\b", status) else status


def _taken(port: int, error: OSError) -> CheckResult:
    if error.errno == errno.EADDRINUSE:
        cure = "fine if this is the cloud's gateway; otherwise end that program or change `listen`"
        return _warning("port", f"a program here listens on {port} already", cure)
    cure = "choose a port above 1023" if error.errno == errno.EACCES else "choose another port for `listen`"
    return _failed("port", f"{port} cannot be taken: {error.strerror}", cure)


def _nothing_listens(name: str, peer: CloudSpec, where: str) -> CheckResult:
    # One rank that names no gateway holds the port itself.
    verb = "gateway" if peer.ranks > 1 or peer.gateway != peer.listen else "run"
    return CheckResult(
        name=name,
        verdict=CheckVerdict.NOTE,
        what=f"{where}: nothing listens there yet",
        cure=f"start the other site when this one is ready: isthmus {verb} JOB --cloud {peer.name}",
    )


def _dial_cure(peer: CloudSpec, error: OSError, *, proxy: Address | None) -> str:
    if isinstance(error, socket.gaierror):
        return "correct the host name in the job, or this machine's name service"
    if proxy is not None:
        return "start the proxy, or correct `proxy` in the job"
    return f"let the firewalls here and at {peer.name} pass this port"


def _certificate_facts(clouds: Sequence[CloudSpec], *, now: datetime) -> list[CertificateFacts]:
    """Return the facts on these clouds and their authorities, from those of their folders that are here."""
    folders = sorted({Path(cloud.certificates) for cloud in clouds})
    names = {"authority", *(cloud.name for cloud in clouds)}
    found = (
        fact for folder in folders if os.access(folder, os.R_OK) for fact in inspect_folder(folder, now=now)
    )
    return [fact for fact in found if fact.name in names]


def _num_open_files(job: Job, cloud: CloudSpec | None) -> int:
    """Return how many files a gateway may hold open: two sockets for every connection to every rank."""
    clouds = (cloud,) if cloud else job.cloud
    return _OTHER_OPEN_FILES + sum(2 * one.ranks * num_connections(job, one.name) for one in clouds)


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ok(name: str, what: str) -> CheckResult:
    return CheckResult(name=name, verdict=CheckVerdict.OK, what=what)


def _warning(name: str, what: str, cure: str) -> CheckResult:
    return CheckResult(name=name, verdict=CheckVerdict.WARNING, what=what, cure=cure)


def _failed(name: str, what: str, cure: str | None) -> CheckResult:
    return CheckResult(name=name, verdict=CheckVerdict.FAILED, what=what, cure=cure)
