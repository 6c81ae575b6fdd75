"""This rank's end of all its links: one port to listen on, one `Link` for each rank it speaks to."""

import logging
import math
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from isthmus.errors import Aborted, IsthmusError, LinkClosed, Refused, Terminated, UserError
from isthmus.job import Address, Job, LinkSpec
from isthmus.job.fields import format_proxy
from isthmus.plan.types import Member
from isthmus.wan.certificates import Identity
from isthmus.wan.exchange import FIRST_STRIPE, LinkSettings
from isthmus.wan.gateway import Registration
from isthmus.wan.handshake import Hello, mismatch, name_of, server_name
from isthmus.wan.inbox import LARGE_BYTES
from isthmus.wan.link import Link
from isthmus.wan.packet import Close
from isthmus.wan.sockets import own_address, try_to_bind
from isthmus.wan.transport import Dialer, Listener, process_loop

log = logging.getLogger(__name__)

MIN_STRIPES = 2
MAX_STRIPES = 16
UNKNOWN_STRIPES = 4
# What a kernel's default buffers let one TCP connection keep under way.
STRIPE_BYTES = 2 * 1024 * 1024
MIN_STREAM_WINDOW_BYTES = 64 * 1024 * 1024
# What ends the run for all; any other error is a crash, after which this cloud may come back.
_LAST_ERRORS = IsthmusError | KeyboardInterrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where this rank stands: what to bind, and where clouds are reached if not where the job says."""

    bind: Address | None = None
    reach: Mapping[str, Address] | None = None


def num_stripes(link: LinkSpec) -> int:
    """How many connections carry bulk: as given, else enough to fill the line."""
    if link.stripes != "auto":
        return link.stripes
    if link.bandwidth_bps is None:
        return UNKNOWN_STRIPES
    line_bps = max(link.bandwidth_bps)
    by_cap = math.ceil(line_bps / link.connection_bps) if link.connection_bps else 1
    by_product = math.ceil(line_bps / 8 * (link.rtt_s or 0.0) / STRIPE_BYTES)
    return min(max(by_cap, by_product, MIN_STRIPES), MAX_STRIPES)


def link_settings(link: LinkSpec, *, sender: str, num_sharing: int = 1) -> LinkSettings:
    """The settings of the sender's end of a link, where so many pairs of ranks share the line."""
    direction = link.between.index(sender)
    bandwidth_bps = link.bandwidth_bps[direction] / num_sharing if link.bandwidth_bps else None
    product_bytes = (bandwidth_bps or 0.0) / 8 * (link.rtt_s or 0.0)
    return LinkSettings(
        num_stripes=max(math.ceil(num_stripes(link) / num_sharing), min(num_stripes(link), MIN_STRIPES)),
        heartbeat_timeout_s=link.heartbeat_timeout_s,
        stream_window_bytes=min(max(MIN_STREAM_WINDOW_BYTES, int(3 * product_bytes)), LARGE_BYTES),
        bandwidth_bps=bandwidth_bps,
        rtt_s=link.rtt_s,
    )


def num_sharing(job: Job, link: LinkSpec) -> int:
    """How many pairs of ranks share the line of a link at once."""
    return max(job.cloud_named(name).ranks for name in link.between)


def num_connections(job: Job, cloud: str) -> int:
    """How many connections all ranks of other clouds together open to one rank of a cloud."""
    count = 0
    for link in job.links_of(cloud):
        dialer = job.dialer(link)
        if dialer.name != cloud:
            settings = link_settings(link, sender=dialer.name, num_sharing=num_sharing(job, link))
            count += dialer.ranks * (FIRST_STRIPE + settings.num_stripes)
    return count


def listening_host(listen: Address) -> str:
    """Where to listen for an address that other clouds dial; empty for all interfaces of this machine."""
    host = own_address(listen.host)
    if host is None:
        log.warning("%s is no one address of this machine: listening on all its interfaces", listen.host)
    return host or ""


class Endpoint:
    """All links of one rank of one cloud."""

    def __init__(
        self,
        job: Job,
        *,
        cloud: str,
        identity: Identity,
        rank: int = 0,
        site: Site | None = None,
    ) -> None:
        self._job = job
        self._cloud = job.cloud_named(cloud)
        self._identity = identity
        self.here = Member(cloud, rank)
        self._hello = Hello(job_digest=job.digest, job=job.agreement, cloud=cloud, rank=rank)
        site = site or Site()
        self._reach = site.reach or {}
        self._links: dict[Member, Link] = {}
        self._lock = threading.Lock()
        self._aborted: Aborted | None = None
        self._loop = process_loop()
        self._listener: Listener | None = None
        self._registration: Registration | None = None
        self.port: int | None = None
        self.may_return = False
        """Whether the others wait for this rank when it crashes, so that a crash does not end the run."""
        self.contains_aborts = False
        """Whether a cloud that aborts ends its own part of the run only."""
        if site.bind is not None:
            self._listen(site.bind)
        elif self._cloud.gateway is not None and self._is_behind_gateway:
            self._listen(Address(host=_host_seen_by(self._cloud.gateway), port=0))
            self._register(self._cloud.gateway)
        elif (listen := self._cloud.listen) is not None:
            everywhere = "::" if ":" in listen.host else "0.0.0.0"  # noqa: S104 (it is there to be reached)
            self._listen(Address(host=listening_host(listen) or everywhere, port=listen.port))

    @property
    def inside_secret(self) -> bytes:
        """What only ranks of this cloud know, to know each other by."""
        return self._identity.secret("ranks")

    def link(self, cloud: str, rank: int = 0) -> Link:
        """The link to a rank of another cloud, opened when it is first asked for."""
        peer = Member(cloud, rank)
        with self._lock:
            if peer not in self._links:
                self._links[peer] = self._make_link(peer)
                if self._aborted is not None:
                    self._links[peer].start_abort(self._aborted)
            return self._links[peer]

    def abort(self, reason: str, *, is_hasty: bool = False) -> None:
        """End the run for every peer at once; in haste, one that never came is not waited for."""
        self._pass_on(Aborted(self.here.cloud, reason))
        for spec in self._job.links_of(self._cloud.name):
            # A cloud may wait for a link that nobody here has asked for yet.
            self.link(spec.peer_of(self.here.cloud))
        links = self._all_links()
        for link in links if is_hasty else ():
            link.hasten()
        for link in links:
            link.join()

    def part(self, reason: str) -> None:
        """End all links; peers hear that this life of them is over, not the run."""
        for link in self._all_links():
            link.hasten()
            link.fail(LinkClosed(reason), last_word=Close())

    def renewed(self, member: Member, reason: str) -> Link:
        """A new link to one member in the place of one that ends for this reason."""
        with self._lock:
            link = self._links.pop(member, None)
        if link is not None:
            link.hasten()
            link.fail(LinkClosed(reason), last_word=Close())
        return self.link(member.cloud, member.rank)

    def renew(self, reason: str) -> None:
        """End all links and forget them: those asked for from now on are of a new epoch."""
        self.part(reason)
        with self._lock:
            self._links.clear()

    def close(self) -> None:
        """Close all links and stop listening."""
        for link in self._all_links():
            link.close()
        if self._registration is not None:
            self._registration.close()
        if self._listener is not None:
            self._loop.run(self._listener.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.may_return and not isinstance(error, _LAST_ERRORS):
            self.part(_words(error))
        elif error is not None:
            # Who was told to end must end; what has failed had better be known to all.
            self.abort(_words(error), is_hasty=isinstance(error, KeyboardInterrupt | Terminated))
        self.close()

    def _all_links(self) -> list[Link]:
        with self._lock:
            return list(self._links.values())

    @property
    def _is_behind_gateway(self) -> bool:
        """A cloud of several ranks shows its gateway's port alone; so does one that names a gateway."""
        return self._cloud.ranks > 1 or self._cloud.gateway != self._cloud.listen

    def _register(self, gateway: Address) -> None:
        log.info("%s registers at its gateway %s", name_of(self.here), gateway)
        address = Address(host=_host_seen_by(gateway), port=self.port or 0)
        self._registration = Registration(
            gateway, identity=self._identity, rank=self.here.rank, address=address
        )
        self._registration.wait()

    def _listen(self, bind: Address) -> None:
        num_expected = num_connections(self._job, self._cloud.name)
        self._listener = Listener(identity=self._identity, find=self._find, num_expected=num_expected)
        try:
            # gRPC keeps to itself what is wrong.
            try_to_bind(bind.host, bind.port)
            self.port = self._loop.run(self._listener.start(str(bind)))
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"cloud {self._cloud.name!r} cannot listen at {bind}: {reason}",
                hint="end what uses the port (a cloud of one rank needs no gateway), or change `listen`",
            ) from error

    def _make_link(self, peer: Member) -> Link:
        spec = next((one for one in self._job.links_of(self.here.cloud) if peer.cloud in one.between), None)
        if spec is None or peer.cloud == self.here.cloud:
            raise Refused(f"the job has no link between {self.here.cloud!r} and {peer.cloud!r}")
        cloud = self._job.cloud_named(peer.cloud)
        if not 0 <= peer.rank < cloud.ranks:
            raise Refused(f"cloud {peer.cloud!r} has no rank {peer.rank} in this job")
        dialer = Dialer(
            address=str(self._reach.get(peer.cloud, cloud.listen)),
            server_name=server_name(*peer),
            identity=self._identity,
            proxy=format_proxy(self._cloud.proxy) if self._cloud.proxy else None,
        )
        return Link(
            hello=self._hello.to(peer),
            settings=link_settings(spec, sender=self.here.cloud, num_sharing=num_sharing(self._job, spec)),
            loop=self._loop,
            dial=dialer if self._job.dialer(spec).name == self.here.cloud else None,
            on_abort=self._hear_abort,
        )

    def _hear_abort(self, error: Aborted) -> None:
        if not self.contains_aborts:
            self._pass_on(error)

    def _pass_on(self, error: Aborted) -> None:
        with self._lock:
            self._aborted = self._aborted or error
        for link in self._all_links():
            link.start_abort(error)

    def _find(self, hello: Hello) -> Link:
        """The link that a caller asks for, or Refused."""
        if reason := mismatch(self._hello.to(hello.sender), hello):
            raise Refused(reason)
        return self.link(hello.cloud, hello.rank)


def _words(error: BaseException) -> str:
    """An error as the other clouds read it."""
    match error:
        case IsthmusError():
            return error.message
        case KeyboardInterrupt():
            return "it was stopped by its user"
    return f"{type(error).__name__}: {error}"


def _host_seen_by(gateway: Address) -> str:
    """Our own address on the way to the gateway; nothing is sent."""
    family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((gateway.host, gateway.port))
        except OSError as error:
            raise UserError(
                f"there is no way to the gateway {gateway}: {error.strerror}",
                hint="correct `gateway`, or `listen`, of this cloud in the job",
            ) from error
        return str(probe.getsockname()[0])
