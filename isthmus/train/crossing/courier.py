"""Carries packets to and from a neighbouring stage, on threads of its own, so that compute never waits."""

import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from isthmus.wan.link import Link
from isthmus.wan.outbox import Priority
from isthmus.wan.packet import Packet

_POLL_S = 0.2

T = TypeVar("T")


class Mailbox(Generic[T]):
    """What other threads put in, one thread takes out; a failure ends it for good."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.put(item)

    def fail(self, error: BaseException) -> None:
        """Let every later take raise this error."""
        self._items.put(error)

    def take(self) -> T:
        """The next item; waits for it."""
        item = self._items.get()
        if isinstance(item, BaseException):
            self._items.put(item)
            raise item
        return item


class Courier:
    """Sends what it is given in order, and hands what arrives to the receiver of its stream."""

    def __init__(
        self,
        link: Link,
        *,
        receivers: Mapping[str, Callable[[Packet], None]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.peer = link.peer.cloud
        self._link = link
        self._receivers = receivers
        self._on_failure = on_failure
        self._is_closing = False
        self._outward = ThreadPoolExecutor(1, thread_name_prefix=f"to-{self.peer}")
        self._inward = ThreadPoolExecutor(1, thread_name_prefix=f"from-{self.peer}")
        self._watch(self._inward.submit(self._receive))

    def send(
        self,
        stream: str,
        make: Callable[[], Packet],
        *,
        priority: Priority = Priority.NORMAL,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Make a packet and send it, off this thread; `then` follows when the link has taken it over."""
        self._watch(self._outward.submit(self._send, stream, make, priority, then))

    def call(self, function: Callable[[], T]) -> T:
        """What a function gives on the thread that sends, behind what is still to be sent; waits for it."""
        return self._outward.submit(function).result()

    def do(self, function: Callable[[], None]) -> None:
        """Have the thread that sends do something, behind what is still to be sent."""
        self._watch(self._outward.submit(function))

    @property
    def rtt_s(self) -> float:
        """The shortest of the latest round trips."""
        return self._link.counters().rtt_s or 0.0

    def close(self) -> None:
        """Send what is left, then end both threads; the link stays open."""
        self._outward.shutdown(wait=True)
        self._is_closing = True
        self._inward.shutdown(wait=True)

    def abandon(self) -> None:
        """Drop what is left; the threads end when the link does."""
        self._is_closing = True
        self._outward.shutdown(wait=False, cancel_futures=True)
        self._inward.shutdown(wait=False)

    def _send(
        self, stream: str, make: Callable[[], Packet], priority: Priority, then: Callable[[], None] | None
    ) -> None:
        self._link.send(stream, make(), priority=priority)
        if then is not None:
            then()

    def _receive(self) -> None:
        while not self._is_closing:
            try:
                stream, packet = self._link.receive_any(tuple(self._receivers), timeout_s=_POLL_S)
            except TimeoutError:
                continue
            self._receivers[stream](packet)

    def _watch(self, future: "Future[None]") -> None:
        future.add_done_callback(self._report)

    def _report(self, future: "Future[None]") -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._on_failure(error)
