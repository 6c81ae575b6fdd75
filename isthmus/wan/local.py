"""All clouds of a job on one machine: throw-away certificates, and each link through an emulated WAN."""

import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from isthmus.job import Address, Job, LinkSpec
from isthmus.plan.faults import Fault
from isthmus.wan.certificates import Identity, parse_server_name, throwaway
from isthmus.wan.endpoint import Site
from isthmus.wan.relay import RelayThread
from isthmus.wan.shaping import Shape

_HOST = "127.0.0.1"


class LocalWan:
    """The emulated WAN of a job; gives each cloud its identity and where it finds the others."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._identities = throwaway([cloud.name for cloud in job.cloud])
        self._reserved = {cloud.name: _reserve_port() for cloud in job.cloud if cloud.listen is not None}
        self._relays: dict[frozenset[str], RelayThread] = {}
        for number, link in enumerate(job.link):
            self._relays[frozenset(link.between)] = self._emulate(link, seed=job.seed + number)

    def identity(self, cloud: str) -> Identity:
        """A cloud's throw-away key and certificate."""
        return self._identities[cloud]

    def site(self, cloud: str) -> Site:
        """What a cloud binds, and the emulated ways to the clouds that it dials."""
        reach = {
            link.peer_of(cloud): self.relay(*link.between).address
            for link in self._job.links_of(cloud)
            if self._job.dialer(link).name == cloud
        }
        return Site(bind=self._bind(cloud), reach=reach)

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
        for reserved in self._reserved.values():
            reserved.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind(self, cloud: str) -> Address | None:
        reserved = self._reserved.get(cloud)
        return Address(host=_HOST, port=reserved.getsockname()[1]) if reserved else None

    def _emulate(self, link: LinkSpec, *, seed: int) -> RelayThread:
        dialer, listener = self._job.dialer(link).name, self._job.listener(link).name
        return RelayThread(
            self._route_to(listener),
            up=_shape(link, sender=dialer),
            down=_shape(link, sender=listener),
            seed=seed,
        )

    def _route_to(self, cloud: str) -> "_Route":
        return _Route(cloud, self._bind(cloud))


class _Route:
    """Only the names of one cloud lead to it."""

    def __init__(self, cloud: str, address: Address | None) -> None:
        self._cloud = cloud
        self._address = address

    def __call__(self, server_name: str) -> Address | None:
        found = parse_server_name(server_name)
        return self._address if found is not None and found[0] == self._cloud else None


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
