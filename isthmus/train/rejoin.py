"""How clouds that train meet one that was lost, while they go on.

    trains     Hail(is_training) with the run config ──►     on each new link
    returns    ◄── Hail                                      then it builds and loads what it has saved itself
               ◄── Hail(is_training)                         once it can take part
    trains     Met ──► loop                                  the link is a wire from now on

Two that both train, and have lost sight of each other, say so at once. Where all clouds only hail, none
trains, and they agree on a start.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Final, Self, TypeVar

from pydantic import Field

from isthmus.errors import Aborted, BadUpdate, FrameError, LinkClosed, LinkError, PeerLost
from isthmus.plan.membership import MAX_LIVES
from isthmus.plan.types import Count, Facts, Member, pack_facts, unpack_facts
from isthmus.train.role import MAX_CONFIG_BYTES
from isthmus.wan.link import Link
from isthmus.wan.packet import Packet

_HAIL: Final = "start/hail"
_TURN_S: Final = 0.1
# A link that has just failed may fail again at once.
_RETRY_S: Final = 0.5
# All that train hail a newcomer at about one time.
_TOGETHER_S: Final = 2.0
_PATIENCE_S: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hail(Facts):
    """The first words of a cloud on a link; with `is_training` the run config goes with them."""

    is_training: bool = False
    epoch: Count = 0
    clock_offset_s: float = 0.0
    """Added to its clock it gives the first cloud's."""
    config: Annotated[str, Field(max_length=MAX_CONFIG_BYTES)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining(Facts):
    """What a cloud that joins a run under way has heard, and from which clouds."""

    hail: Hail
    clouds: tuple[str, ...]
    life: Count = 0
    """Differs from life to life of this cloud, which may have forgotten what it did in those before."""


def new_life() -> int:
    """The number of a life of a cloud."""
    return 1 + secrets.randbelow(MAX_LIVES - 1)


def say(link: Link, hail: Hail) -> None:
    """Hail the other end."""
    text = pack_facts(hail, max_bytes=2 * MAX_CONFIG_BYTES)
    link.send(_HAIL, Packet({}, (text.encode(),)))


def hear(link: Link, *, timeout_s: float) -> Hail:
    """What the other end says."""
    buffers = link.receive(_HAIL, timeout_s=timeout_s).buffers
    if len(buffers) != 1 or memoryview(buffers[0]).nbytes > 2 * MAX_CONFIG_BYTES:
        raise FrameError("a hail that is none")
    return unpack_facts(bytes(buffers[0]).decode(errors="replace"), Hail, max_bytes=2 * MAX_CONFIG_BYTES)


def hail_all(
    links: Mapping[str, Link], *, on_waiting: Callable[[Link], None], until_s: float = math.inf
) -> Joining | None:
    """Hail all clouds at the other ends of links; what those say that train, or None once all are there."""
    said: set[str] = set()
    heard: dict[str, Hail] = {}
    told_s, end_s = time.monotonic() + _PATIENCE_S, math.inf
    while len(heard) < len(links) and time.monotonic() < end_s:
        missing = sorted(links.keys() - heard.keys())
        for cloud in missing:
            hail = _hail(links[cloud], said)
            heard |= {} if hail is None else {cloud: hail}
        now_s = time.monotonic()
        if end_s == math.inf and any(one.is_training for one in heard.values()):
            end_s = now_s + _TOGETHER_S
        if now_s > until_s:
            raise PeerLost(missing[0], "it has not come back within checkpoint.patience")
        if now_s > told_s:
            told_s = math.inf
            for cloud in links.keys() - heard.keys():
                on_waiting(links[cloud])
    training = sorted(cloud for cloud, hail in heard.items() if hail.is_training)
    if not training:
        return None
    first = heard[training[0]]
    offset_s = first.clock_offset_s + (links[training[0]].counters().clock_offset_s or 0.0)
    hail = Hail(epoch=first.epoch + 1, clock_offset_s=offset_s, config=first.config)
    return Joining(hail=hail, clouds=tuple(training), life=new_life())


def _hail(link: Link, said: set[str]) -> Hail | None:
    """Hail a cloud once, and hear what it says, if it is there."""
    try:
        if link.peer.cloud not in said:
            link.wait_ready(timeout_s=_TURN_S)
            say(link, Hail())
            said.add(link.peer.cloud)
        return hear(link, timeout_s=_TURN_S)
    except TimeoutError:
        return None


class Rejoin:
    """Meets members again that were lost, each on a thread of its own, while this one trains."""

    def __init__(
        self,
        *,
        cloud: str,
        renew: Callable[[Member, str], Link],
        hail: Hail,
        on_met: Callable[[Link], None],
        note: Callable[[str], None],
    ) -> None:
        self._cloud = cloud
        self._renew = renew
        self._hail = hail
        self._on_met = on_met
        self._note = note
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, links: Collection[Link], lost: Collection[Member]) -> None:
        """Tell those that are met that this cloud takes part now, and wait for those that are not."""
        for link in links:
            say(link, self._hail)
        for member in lost:
            self._await_return(member, "this cloud trains now")

    def expect(self, member: Member, error: LinkError) -> None:
        """Meet a member again that is lost, unless what it sends cannot be used."""
        if member.cloud == self._cloud:
            # Without a rank of its own a cloud cannot go on.
            return
        if isinstance(error, BadUpdate | FrameError):
            self._note(f"{error.message}; the others continue without it")
            link = self._renew(member, error.message)
            link.start_abort(Aborted(self._cloud, error.message))
            return
        self._note(f"{error.message}; the others continue, and meet it again when it is there")
        self._await_return(member, error.message)

    def _await_return(self, member: Member, reason: str) -> None:
        """Wait for a member on a thread."""
        thread = threading.Thread(target=self._await, args=(member, reason), name=f"await-{member}")
        self._threads.append(thread)
        thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for nobody any more."""
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _await(self, member: Member, reason: str) -> None:
        while not self._closing.is_set():
            link = self._renew(member, reason)
            try:
                heard = self._greet(link)
            except LinkError as error:
                link.hasten()
                reason = error.message
                self._closing.wait(_RETRY_S)
                continue
            if heard.config == self._hail.config:
                self._note(f"cloud {member.cloud!r} is there again")
                self._on_met(link)
            else:
                self._note(
                    f"cloud {member.cloud!r} trains another run of this job, and takes no part in this one"
                )
            return

    def _greet(self, link: Link) -> Hail:
        """What a member says once it takes part."""
        self._wait(lambda: link.wait_ready(timeout_s=_TURN_S))
        say(link, self._hail)
        while not (heard := self._wait(lambda: hear(link, timeout_s=_TURN_S))).is_training:
            continue
        return heard

    def _wait(self, step: Callable[[], T]) -> T:
        """Try again and again what gives up after a moment."""
        while not self._closing.is_set():
            try:
                return step()
            except TimeoutError:
                continue
        raise LinkClosed("this cloud has ended the run")
