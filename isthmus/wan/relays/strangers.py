"""Limits for connections that are not authenticated yet, and for what the log says about them.

Such a connection costs a descriptor, so their number is limited in all and per source address.
"""

import ipaddress
import resource
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

_FIRST_WAIT_S = 60.0
_MAX_WAIT_S = 3600.0
# Who tries again does so within seconds; what has rested for longer is news.
_REST_S = 30.0
_MAX_NUM_KEPT = 1024
_SPELL_S = 60.0
_MAX_NUM_TOLD = 30
_MAX_LENGTH = 300
_IPV6_SOURCE_BITS = 64

_Kept = TypeVar("_Kept", bound=Hashable)


@dataclass(slots=True)
class _Told:
    told_s: float
    heard_s: float
    wait_s: float = _FIRST_WAIT_S
    num_untold: int = 0


class Complaints:
    """Limits log lines about refused peers.

    Complaints of one kind about one peer are told once, and then ever more rarely, with how often they came.
    The peer may have chosen words of a complaint, so new words are no news. At most 30 complaints are told in
    a minute.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str, str], _Told] = {}
        self._spell_s = clock()
        self._num_told = 0
        self._num_hidden = 0

    def tell(self, who: str, what: str, *, kind: str) -> str | None:
        """The complaint as it should be told now, or None where one of its kind was told lately."""
        words = self._words((who, kind), what[:_MAX_LENGTH])
        if self._clock() - self._spell_s >= _SPELL_S:
            self._spell_s, self._num_told = self._clock(), 0
        if words is None or self._num_told >= _MAX_NUM_TOLD:
            self._num_hidden += words is not None
            return None
        self._num_told += 1
        if self._num_hidden:
            words += f" (and {self._num_hidden} complaints about others)"
            self._num_hidden = 0
        return words

    def _words(self, key: tuple[str, str], what: str) -> str | None:
        now_s, known = self._clock(), self._told.get(key)
        if known is None or now_s - known.heard_s > _REST_S:
            self._remember(key, _Told(told_s=now_s, heard_s=now_s))
            return what
        known.heard_s = now_s
        known.num_untold += 1
        if now_s - known.told_s < known.wait_s:
            return None
        words = f"{what} ({known.num_untold} times in {now_s - known.told_s:.0f} s)"
        known.told_s, known.num_untold = now_s, 0
        known.wait_s = min(2 * known.wait_s, _MAX_WAIT_S)
        return words

    def _remember(self, key: tuple[str, str], told: _Told) -> None:
        # Peers may come from any number of addresses, so the oldest is forgotten.
        self._told.pop(key, None)
        if len(self._told) >= _MAX_NUM_KEPT:
            del self._told[next(iter(self._told))]
        self._told[key] = told


class Pending(Generic[_Kept]):
    """Unauthenticated connections by source; beyond a limit, the oldest of the source with most is evicted.

    So a source that floods a port evicts its own connections, and a connection from elsewhere is accepted.
    """

    def __init__(self) -> None:
        self._source: dict[_Kept, str] = {}
        self._by_source: dict[str, dict[_Kept, None]] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[_Kept]:
        return iter([*self._source])

    def __contains__(self, one: _Kept) -> bool:
        return one in self._source

    def add(self, one: _Kept, *, source: str) -> None:
        """Add a connection."""
        self._source[one] = source
        self._by_source.setdefault(source, {})[one] = None

    def discard(self, one: _Kept) -> None:
        """Remove a connection that has ended or is authenticated."""
        source = self._source.pop(one, None)
        if source is not None:
            del self._by_source[source][one]
            if not self._by_source[source]:
                del self._by_source[source]

    def evict(self, *, max_num: int, max_num_per_source: int) -> list[_Kept]:
        """Remove connections until both limits hold, and return them to be closed."""
        gone: list[_Kept] = []
        while self._by_source:
            busiest = max(self._by_source.values(), key=len)
            if len(self) <= max_num and len(busiest) <= max_num_per_source:
                break
            gone.append(next(iter(busiest)))
            self.discard(gone[-1])
        return gone


def source_of(host: str) -> str:
    """The source of an address: an IPv4 address itself, of an IPv6 address its /64, which one user owns."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, _IPV6_SOURCE_BITS), strict=False))
        address = address.ipv4_mapped
    return str(address)


def num_files_left(*, num_reserved: int) -> int:
    """The number of descriptors that this process may open, less those that are reserved."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2**20 if soft == resource.RLIM_INFINITY else soft
    return max(limit - num_reserved, 1)
