"""A cloud's one port: its ranks register here, and other clouds reach them by TLS server name.

    rank 3 ── link to gateway.east.isthmus, with address="10.0.0.5:43211" in its hello ──▶ gateway
    west   ── TLS to rank-3.east.isthmus ──▶ gateway ── the same bytes ──▶ 10.0.0.5:43211

A registration is a link that carries no packets: heartbeats, refusals and new dials are those of all links.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.errors import Aborted, LinkClosed, NotReady, Refused, UserError
from isthmus.job import Address
from isthmus.job.fields import parse_address
from isthmus.plan.types import Member
from isthmus.wan.certificates import Identity
from isthmus.wan.exchange import LinkSettings
from isthmus.wan.handshake import GATEWAY_RANK, Hello, mismatch, parse_server_name, server_name
from isthmus.wan.link import Link
from isthmus.wan.relay import Relay, RelayLimits
from isthmus.wan.sockets import Closing, Complaints, num_files_left
from isthmus.wan.transport import Dialer, Listener, process_loop

REGISTRATION = LinkSettings(heartbeat_timeout_s=15.0, num_stripes=0)

_PATIENCE_S = 1.0
_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Registration:
    """Keeps a rank registered: again and again if need be, until closed or turned down."""

    def __init__(
        self,
        gateway: Address,
        *,
        identity: Identity,
        rank: int,
        address: Address,
        settings: LinkSettings = REGISTRATION,
    ) -> None:
        self._gateway = gateway
        self._settings = settings
        here = Hello(cloud=identity.cloud, rank=rank, address=str(address))
        self._hello = here.to(Member(identity.cloud, GATEWAY_RANK))
        self._dial = Dialer(
            address=str(gateway), server_name=server_name(identity.cloud, GATEWAY_RANK), identity=identity
        )
        self._complaints = Complaints(_log)
        self._is_closed = False
        self.link = self._open()
        self._keeping = process_loop().submit(self._keep())

    def wait(self) -> None:
        """Wait until the rank is registered; Refused if the gateway turns it down."""
        while True:
            try:
                self.link.wait_ready(timeout_s=_PATIENCE_S)
            except TimeoutError:
                self._complain(self.link.problem or "no answer yet")
            else:
                return

    def close(self) -> None:
        """Leave the gateway."""
        link = process_loop().run(self._stop())
        link.hasten()
        link.close()
        self._keeping.result()

    def _open(self) -> Link:
        return Link(hello=self._hello, settings=self._settings, loop=process_loop(), dial=self._dial)

    async def _stop(self) -> Link:
        self._is_closed = True
        return self.link

    async def _keep(self) -> None:
        while True:
            await self.link.ended.wait()
            failure = self.link.failure
            if isinstance(failure, Refused | Aborted) and not isinstance(failure, NotReady):
                _log.error("gateway %s refuses %s: %s", self._gateway, self._hello.who, failure)
                return
            if not self._is_closed:
                self._complain(str(failure))
                # Ranks that lost the same gateway must not come back all at once.
                await asyncio.sleep(random.uniform(0, _RETRY_S))  # noqa: S311 (no secret)
            if self._is_closed:
                return
            self.link = self._open()

    def _complain(self, reason: str) -> None:
        self._complaints.tell(f"gateway {self._gateway}: {reason}; trying again", about="gateway", kind="")


# By then a rank, or the registration, has disconnected a peer without a valid certificate.
_UNPROVEN_S = 15.0
_NUM_WAITING = 256
_NUM_OPEN = 2048
_NUM_FILES_RESERVED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange:
    """A rank has registered at an address, or has left if there is none; `num_registered` are there now."""

    rank: int
    address: Address | None
    num_registered: int


class Gateway(Closing):
    """Relays connections to the registered ranks of one cloud; other clouds are to open `num_expected`.

    It listens at host and port, on all interfaces if `host` is empty. Of two registrations of a rank the
    newer one holds: both come from this cloud, by its certificate, and the usual reason is a rank that was
    restarted before its old connection was known to be dead. The older one is told, so that two living ranks
    of the same number end in an error and not in a tug of war. `on_change` is called on the event loop.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        identity: Identity,
        num_ranks: int,
        num_expected: int = 0,
        on_change: Callable[[RankChange], None] | None = None,
        settings: LinkSettings = REGISTRATION,
    ) -> None:
        self._cloud = identity.cloud
        self._num_ranks = num_ranks
        self._on_change = on_change
        self._settings = settings
        self._loop = process_loop()
        self._holders: dict[int, tuple[Address, Link]] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._listener = Listener(identity=identity, find=self._find, num_expected=num_ranks)
        inside = self._loop.run(self._listener.start("127.0.0.1:0"))
        self._inside = Address(host="127.0.0.1", port=inside)
        limits = relay_limits(num_ranks=num_ranks, num_expected=num_expected)
        try:
            self._relay = Relay(self.route, limits=limits, host=host, port=port)
        except UserError:
            self._loop.run(self._listener.close())
            raise
        self.address = self._relay.address

    def close(self) -> None:
        """Reset what is relayed and let go of all registrations."""
        self._relay.close()
        for _, link in [*self._holders.values()]:
            link.fail(LinkClosed(f"the gateway of {self._cloud} has ended"))
        self._loop.run(self._listener.close())

    def route(self, name: str) -> Address:
        """Return where a server name leads, or raise Refused with the reason."""
        member = parse_server_name(name)
        if member is None:
            raise Refused(f"{name!r} is not the name of a rank")
        if member.cloud != self._cloud:
            raise Refused(f"this is the gateway of {self._cloud}, not of {member.cloud}")
        if member.rank == GATEWAY_RANK:
            return self._inside
        if member.rank not in self._holders:
            raise Refused(f"rank {member.rank} of {member.cloud} has not registered")
        return self._holders[member.rank][0]

    # On the event loop.

    def _find(self, hello: Hello) -> Link:
        """The link to a rank, which is registered from now on, or Refused."""
        here = Hello(cloud=self._cloud, rank=GATEWAY_RANK).to(hello.sender)
        if hello.cloud != self._cloud:
            raise Refused(f"only ranks of {self._cloud} register here, not {hello.cloud}")
        if hello.rank >= self._num_ranks:
            raise Refused(f"{self._cloud} has no rank {hello.rank}, only 0 to {self._num_ranks - 1}")
        if reason := mismatch(here, hello):
            raise Refused(reason)
        older = self._holders.get(hello.rank)
        if older is not None and older[1].failure is None and older[1].peer_session == hello.session:
            return older[1]
        if hello.met:
            raise Refused(f"the gateway of {self._cloud} has restarted")
        try:
            address = parse_address(hello.address)
        except ValueError as error:
            raise Refused(str(error)) from None
        if older is not None:
            reason = f"rank {hello.rank} has been registered again, at {address}"
            older[1].start_abort(Aborted(self._cloud, reason))
        return self._register(here, hello.rank, address)

    def _register(self, here: Hello, rank: int, address: Address) -> Link:
        link = Link(hello=here, settings=self._settings, loop=self._loop)
        self._holders[rank] = (address, link)
        self._tell(rank, address)
        follower = asyncio.create_task(self._follow(rank, link))
        self._followers.add(follower)
        follower.add_done_callback(self._followers.discard)
        return link

    async def _follow(self, rank: int, link: Link) -> None:
        """Forget a rank once its link has ended."""
        await link.ended.wait()
        if self._holders[rank][1] is link:
            del self._holders[rank]
            self._tell(rank, None)

    def _tell(self, rank: int, address: Address | None) -> None:
        if self._on_change is not None:
            self._on_change(RankChange(rank=rank, address=address, num_registered=len(self._holders)))


def relay_limits(*, num_ranks: int, num_expected: int) -> RelayLimits:
    """Limits for the descriptors of this process: two per open connection, three per registered rank."""
    num_files = num_files_left(num_reserved=2 * _NUM_FILES_RESERVED + 3 * num_ranks)
    num_waiting = max(min(_NUM_WAITING + num_expected, num_files // 4), 4)
    return RelayLimits(
        unproven_s=_UNPROVEN_S,
        max_num_waiting=num_waiting,
        max_num_waiting_per_source=num_waiting // 4 + min(num_expected, num_waiting // 2),
        max_num_open=max(min(max(_NUM_OPEN, 2 * num_expected), (num_files - num_waiting) // 2), 4),
    )
