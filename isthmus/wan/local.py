"""All clouds of a job on one machine: throw-away certificates, and each link through an emulated WAN."""

import itertools
import socket
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from isthmus.job import Address, Job, LinkSpec
from isthmus.plan.faults import Fault
from isthmus.wan.endpoint import Site
from isthmus.wan.handshake import Seat, server_name
from isthmus.wan.relays.relay import RelayThread
from isthmus.wan.relays.shaping import Shape
from isthmus.wan.trust.certificates import Identity, throwaway

_HOST = "127.0.0.1"


class LocalWan:
    """The emulated WAN of a job; gives each cloud its identity and where it finds the others."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._identities = throwaway([cloud.name for cloud in job.cloud])
        self._reserved = {
            (cloud.name, rank): _reserve_port()
            for cloud in job.cloud
            if cloud.listen is not None
            for rank in range(cloud.ranks)
        }
        self._meetings = {cloud.name: _reserve_port() for cloud in job.cloud if cloud.ranks > 1}
        self._relays: dict[frozenset[str], RelayThread] = {}
        for number, link in enumerate(job.link):
            self._relays[frozenset(link.between)] = self._emulate(link, seed=job.seed + number)

    def identity(self, cloud: str) -> Identity:
        """A cloud's throw-away key and certificate."""
        return self._identities[cloud]

    def site(self, cloud: str, rank: int = 0) -> Site:
        """What a rank of a cloud binds, and the emulated ways to the clouds that it dials."""
        reach = {
            link.peer_of(cloud): self.relay(*link.between).address
            for link in self._job.links_of(cloud)
            if self._job.dialer(link).name == cloud
        }
        return Site(bind=self._bind(cloud, rank), reach=reach)

    def seat(self, cloud: str, rank: int) -> Seat:
        """The place of a rank among those of its cloud; all processes here share the machine's devices."""
        before = itertools.takewhile(lambda one: one.name != cloud, self._job.cloud)
        meeting = self._meetings.get(cloud)
        return Seat(
            rank=rank,
            num_ranks=self._job.cloud_named(cloud).ranks,
            local_rank=sum(one.ranks for one in before) + rank,
            master=None if meeting is None else _address(meeting),
        )

    def relay(self, first: str, second: str) -> RelayThread:
        """The WAN between two clouds, to count its bytes or to disturb it."""
        return self._relays[frozenset((first, second))]

    def play(self, faults: Iterable[Fault]) -> None:
        """Let faults happen, each on its link and at its time from now on."""
        script = tuple(faults)
        for link in self._job.link:
            own = [fault for fault in script if set(fault.between) == set(link.between)]
            self.relay(*link.between).play(own, dialer=self._job.dialer(link).name)

    def close(self) -> None:
        """End all relays."""
        for relay in self._relays.values():
            relay.close()
        for reserved in (*self._reserved.values(), *self._meetings.values()):
            reserved.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind(self, cloud: str, rank: int) -> Address | None:
        reserved = self._reserved.get((cloud, rank))
        return _address(reserved) if reserved else None

    def _emulate(self, link: LinkSpec, *, seed: int) -> RelayThread:
        dialer, listener = self._job.dialer(link).name, self._job.listener(link).name
        return RelayThread(
            self._route_to(listener),
            up=_shape(link, sender=dialer),
            down=_shape(link, sender=listener),
            seed=seed,
        )

    def _route_to(self, cloud: str) -> Callable[[str], Address | None]:
        """Only the names of one cloud's ranks lead to it, each to its own."""
        return {
            server_name(cloud, rank): _address(one)
            for (name, rank), one in self._reserved.items()
            if name == cloud
        }.get


def _address(reserved: socket.socket) -> Address:
    return Address(host=_HOST, port=reserved.getsockname()[1])


def _shape(link: LinkSpec, *, sender: str) -> Shape:
    return Shape(
        bandwidth_bps=link.bandwidth_bps[link.between.index(sender)] if link.bandwidth_bps else None,
        delay_s=(link.rtt_s or 0.0) / 2,
        jitter_s=link.jitter_s / 2,
        connection_bps=link.connection_bps,
    )


def _reserve_port() -> socket.socket:
    """A port that nobody else is given; it is bound and never listens, so the cloud itself can."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((_HOST, 0))
    return reserved
