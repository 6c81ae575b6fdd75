"""The link between two clouds: reliable, ordered streams of packets over connections that come and go.

A `Link` is one end. Any thread sends and receives; an event loop on its own thread moves the bytes:

    send → outbox → chunks ⇉ connections ⇉ inbox → receive
                       ↑                     │
                       └── acknowledgements ─┘          (on the control connection)

Connection 0 is for control (heartbeats, acknowledgements, abort, close), 1 for urgent chunks only, the others
are stripes for all chunks. A connection that breaks is dialled again; its unacknowledged chunks go again, and
the other end drops what it already has. So nothing is lost, doubled or reordered while both ends live.

An end that finishes sends a last word, abort or close, and the other end answers with its own. An end that
has not heard the other's keeps the control connection up, or keeps dialling it, until the time is over.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import uniform
from typing import Protocol

from isthmus.errors import Aborted, FrameError, LinkClosed, LinkError, NotReady, PeerLost, Refused
from isthmus.events import steady_ns
from isthmus.plan.types import Member
from isthmus.wan.exchange import CONTROL_LANE, EXPRESS_LANE, FIRST_STRIPE, Exchange, LinkSettings
from isthmus.wan.handshake import Hello
from isthmus.wan.packet import (
    Abort,
    Ack,
    Chunk,
    Close,
    ControlFrame,
    Frame,
    Notice,
    Ping,
    Pong,
    decode,
    encode,
)
from isthmus.wan.sockets import Complaints, LoopThread

log = logging.getLogger(__name__)

ACK_INTERVAL_S = 0.005
FAREWELL_S = 2.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
# Of the heartbeat time-out, in which each end pings eight times or more.
SILENT_SHARE = 0.25


class Connection(Protocol):
    """One authenticated, ordered pipe of frames."""

    async def read(self) -> bytes:
        """The next frame, or something false at the end; ConnectionError if the pipe breaks."""

    async def write(self, frame: bytes) -> None:
        """Send a frame; returns when the pipe can take another; ConnectionError if it breaks."""


Dial = Callable[[Hello], AbstractAsyncContextManager[tuple[Connection, Hello]]]
"""Open the connection that the hello asks for, until the end of the block; gives what the peer has said.

Refused is final, ConnectionError is worth another try.
"""


class LinkState(StrEnum):
    """What a link does now; only the first four may still change."""

    WAITING = "waiting"
    UP = "up"
    SILENT = "silent"
    RECONNECTING = "reconnecting"
    DOWN = "down"
    CLOSED = "closed"


OnState = Callable[[Member, LinkState, str], None]
"""Takes a change of state of the link to a member, and why; called on the event loop, so it must be quick."""


@dataclass(slots=True)
class _Lane:
    """A connection in use."""

    connection: Connection
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)
    heard_s: float = field(default_factory=time.monotonic)


class Link(Exchange):
    """One end of a link to one rank of another cloud: the exchange, and the connections that it goes over."""

    def __init__(
        self,
        *,
        hello: Hello,
        settings: LinkSettings,
        loop: LoopThread,
        dial: Dial | None = None,
        on_abort: Callable[[Aborted], None] | None = None,
    ) -> None:
        super().__init__(settings, peer=hello.whom, wake=lambda: loop.call(self._wake_all))
        self.hello = replace(hello, session=secrets.token_hex(8))
        self.settings = settings
        self.state = LinkState.WAITING
        self.on_state: OnState | None = None
        self.problem = ""
        """Why the peer could not be reached at the last try, empty where nothing is known."""
        self._here = hello.who
        self._on_abort = on_abort
        self._dials = dial is not None
        self.peer_session: str | None = None
        self._is_known = False
        self._turned_away_s = 0.0
        self._is_hasty = False
        self._lanes: dict[int, _Lane] = {}
        self._complaints = Complaints(log)
        self._met, self._parted, self._idle = (asyncio.Event() for _ in range(3))
        self.ended = asyncio.Event()
        """Set on the event loop when the link has failed or finished."""
        self._idle.set()
        self._running: Future[None] = loop.submit(self._run(dial))

    @property
    def peer(self) -> Member:
        """The rank at the other end."""
        return self.hello.peer

    # For users, from any thread.

    def abort(self, reason: str) -> None:
        """End the run for this peer: its calls raise Aborted as soon as word has come, ours at once.

        Waits for word to get through: as long as the heartbeat time-out where the peer has not come yet, less
        if hastened.
        """
        self.start_abort(Aborted(self.hello.cloud, reason))
        self.join()

    def start_abort(self, error: Aborted) -> None:
        """Abort without waiting for word to get through; `join` waits."""
        self.fail(error, last_word=Abort(error.cloud, error.reason))

    def hasten(self) -> None:
        """Give the last word only a moment to get through, even if the peer has not come yet."""
        self._is_hasty = True

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait until the peer has everything, say farewell and end; a link that has failed just ends."""
        self.wait_empty(timeout_s=timeout_s)
        self.fail(LinkClosed(f"the link to {self._peer} is closed"), last_word=Close())
        self.join()

    def join(self) -> None:
        """Wait until a link that has failed or finished has let go of its connections."""
        self._running.result()

    # For the transport, on the event loop.

    def admit(self, hello: Hello) -> None:
        """Prepare for a connection of the peer, or raise Refused; the first fixes the peer's session.

        `NotReady` where the connection may be taken a little later.
        """
        if hello.met not in ("", self.hello.session):
            raise Refused(f"{self._here} has begun a new epoch")
        if self.failure is not None and not self._needs(hello.lane):
            kind = Refused if isinstance(self.failure, Aborted) else NotReady
            raise kind(f"{self._here} has ended its link: {self.failure.message}")
        if self.peer_session not in (None, hello.session):
            # A process that has ended leaves no control connection, and one that is silent is hung up.
            if CONTROL_LANE in self._lanes:
                both = f"{self._peer} is already connected to {self._here}"
                raise NotReady(f"{both}: end one of its two processes")
            self._lose("has restarted")
            raise NotReady(f"{self._peer} has restarted while {self._here} has not")
        self.peer_session = hello.session
        # It must be missed even if it vanishes before its connection is used.
        self.heartbeat.heard()
        self._met.set()

    def greeting(self, lane: int) -> Hello:
        """The hello of this end for one connection."""
        return replace(self.hello, lane=lane, met=self.peer_session or "")

    def give_up(self) -> None:
        """The peer cannot come any more: end, and wait for nothing."""
        self._parted.set()
        self._lose("has ended its link")

    async def serve(self, number: int, connection: Connection) -> None:
        """Use a connection until it ends."""
        lane = _Lane(connection)
        self._open(number, lane)
        writing = self._write_control(lane) if number == CONTROL_LANE else self._write_chunks(number, lane)
        tasks = [asyncio.ensure_future(one) for one in (self._read(lane), writing, lane.hang_up.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # gRPC may cancel its handler more than once, so nothing that matters comes after an await.
            self._close(number, lane)
            for task in tasks:
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            self._explain(number, outcome)

    # Connections.

    async def _run(self, dial: Dial | None) -> None:
        """The link's whole life on the event loop; when it is over, nothing of it is left there."""
        num_lanes = FIRST_STRIPE + self.settings.num_stripes if self.settings.num_stripes else 1
        lanes = range(num_lanes if dial is not None else 0)
        keeping = [asyncio.ensure_future(self._keep(number, dial)) for number in lanes if dial is not None]
        for task in keeping:
            task.add_done_callback(self._end_if_broken)
        await self._watch()
        await self._say_farewell()
        self._parted.set()
        for lane in self._lanes.values():
            lane.hang_up.set()
        # A connection must close in its own time; only what still dials or waits is cancelled.
        await self._idle.wait()
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)

    async def _keep(self, number: int, dial: Dial) -> None:
        """Dial, serve, and dial again, waiting longer after each failure; control goes first."""
        if number != CONTROL_LANE:
            await self._met.wait()
        # Several tries must fall into the time-out.
        max_backoff_s = min(MAX_BACKOFF_S, self.settings.heartbeat_timeout_s / 8)
        backoff_s = FIRST_BACKOFF_S
        while self._needs(number):
            try:
                async with dial(self.greeting(number)) as (connection, hello):
                    backoff_s = FIRST_BACKOFF_S
                    self.admit(hello)
                    await self.serve(number, connection)
            except Refused as refused:
                self._refused(number, refused)
            except ConnectionError as error:
                self._complain(number, str(error))
            await asyncio.sleep(uniform(0.5, 1.0) * backoff_s)  # noqa: S311 (no secret)
            backoff_s = min(2 * backoff_s, max_backoff_s)

    def _needs(self, number: int) -> bool:
        """Whether a connection has a use: any while the link lives, control until the last words are said."""
        if self.failure is None:
            return True
        is_parting = self.last_word is not None and not self._parted.is_set()
        return number == CONTROL_LANE and is_parting

    def _end_if_broken(self, keeping: "asyncio.Task[None]") -> None:
        error = None if keeping.cancelled() else keeping.exception()
        if error is not None:
            log.error("link to %s cannot go on", self._peer, exc_info=error)
            self.fail(LinkError(f"the link to {self._peer} cannot go on: {error}"))

    def _refused(self, number: int, refused: Refused) -> None:
        if number != CONTROL_LANE:
            # The peer has ended its link, and its control connection is about to say why.
            self._complain(number, refused.message)
            return
        if isinstance(refused, NotReady) and self.failure is None and not self._met.is_set():
            self._turned_away_s = self._turned_away_s or time.monotonic()
            # A silent control connection of an earlier life is hung up after half the time-out.
            if time.monotonic() < self._turned_away_s + 0.6 * self.settings.heartbeat_timeout_s:
                self._complain(number, refused.message)
                return
        self._parted.set()
        if self._met.is_set():
            # The peer has met us before, so it is another life of it that turns us down.
            self._lose(f"has ended its link: {refused.message}")
        # A new error, because the traceback of this one would keep gRPC's call and channel alive.
        self.fail(type(refused)(refused.message, hint=refused.hint))

    def _complain(self, number: int, reason: str) -> None:
        """Log why the peer cannot be reached, once for each reason: it may just not have started yet."""
        level = logging.DEBUG if reason == self.problem else logging.INFO
        self.problem = reason
        log.log(level, "connection %d to %s: %s", number, self._peer, reason)

    def _open(self, number: int, lane: _Lane) -> None:
        if number in self._lanes:
            self._close(number, self._lanes[number])
        self._lanes[number] = lane
        self.problem = ""
        self._idle.clear()
        with self._changed:
            self._num_opened[number] += 1
            if number == CONTROL_LANE:
                self._is_up = self._ack_due = True
                self._inbox.repeat_consumed()
                self._changed.notify_all()
            else:
                self._outbox.open_lane(number, is_express=number == EXPRESS_LANE, now_s=time.monotonic())
        if not self._needs(number):
            lane.hang_up.set()
        self._note_state()

    def _close(self, number: int, lane: _Lane) -> None:
        lane.hang_up.set()
        if self._lanes.get(number) is lane:
            del self._lanes[number]
            with self._changed:
                if number == CONTROL_LANE:
                    self._is_up = False
                else:
                    self._outbox.close_lane(number)
            self._wake_all()
        if not self._lanes:
            self._idle.set()
        self._note_state()

    def _explain(self, number: int, outcome: object) -> None:
        if isinstance(outcome, FrameError):
            text = f"link to {self._peer}, connection {number} dropped: {outcome.message}"
            self._complaints.tell(text, about=self._peer, kind="frame")
        elif isinstance(outcome, LinkError):
            # A new error, as for a refusal.
            error = LinkError(outcome.message, hint=outcome.hint)
            self.fail(error, last_word=Abort(self.hello.cloud, error.message))
        elif isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError):
            raise outcome

    # The end, and what leads to it.

    async def _watch(self) -> None:
        """Judge by progress: silence on all connections is a lost peer, on one a broken connection."""
        timeout_s = self.settings.heartbeat_timeout_s
        while self.failure is None:
            await _wait_for(self.ended, min(timeout_s / 20, 0.25))
            if self.heartbeat.is_lost:
                self._lose(f"has been silent for {timeout_s:g} s")
            self._hang_up_stalled()
            self._note_state()

    def _note_state(self) -> None:
        """Report a change of state; that a link is up for the first time, or was closed, is no news."""
        before, self.state = self.state, self._find_state()
        is_news = before is not LinkState.WAITING and self.state is not LinkState.CLOSED
        if self.state is before or not is_news:
            return
        failure, is_up = self.failure, self.state is LinkState.UP
        reason = "" if is_up else failure.message if failure else self.problem
        level = logging.INFO if is_up else logging.WARNING
        log.log(level, "link to %s is %s%s", self._peer, self.state, f": {reason}" if reason else "")
        if self.on_state is not None:
            self.on_state(self.peer, self.state, reason)

    def _find_state(self) -> LinkState:
        failure = self.failure
        if failure is not None:
            return LinkState.CLOSED if isinstance(failure, LinkClosed) else LinkState.DOWN
        if CONTROL_LANE not in self._lanes:
            return LinkState.WAITING if self.state is LinkState.WAITING else LinkState.RECONNECTING
        is_silent = self.heartbeat.silent_s > SILENT_SHARE * self.settings.heartbeat_timeout_s
        return LinkState.SILENT if is_silent else LinkState.UP

    def _hang_up_stalled(self) -> None:
        timeout_s = self.settings.heartbeat_timeout_s
        for number, lane in self._lanes.items():
            if number == CONTROL_LANE:
                is_stalled = time.monotonic() - lane.heard_s > timeout_s / 2
            else:
                with self._changed:
                    since_s = self._outbox.stalled_since_s(number)
                is_stalled = since_s is not None and time.monotonic() - since_s > timeout_s
            if is_stalled and not lane.hang_up.is_set():
                log.warning(
                    "link to %s, connection %d makes no progress and is opened again", self._peer, number
                )
                lane.hang_up.set()

    async def _say_farewell(self) -> None:
        """Give our last word, if there is one, time to get through, and hear the peer's."""
        if self.last_word is None:
            return
        await _wait_for(self._parted, FAREWELL_S)
        patience_s = self.settings.heartbeat_timeout_s - FAREWELL_S
        if not (self._is_known or self._is_hasty or self._parted.is_set()) and patience_s > 0:
            # A peer that has met us would miss us; one that has not would wait for ever.
            log.warning("%s may wait for us: trying for %g s to tell it", self._peer, patience_s)
            await _wait_for(self._parted, patience_s)
        control = self._lanes.get(CONTROL_LANE)
        if control is not None and self._parted.is_set():
            await _wait_for(control.hang_up, FAREWELL_S)

    def _lose(self, what: str) -> None:
        self.fail(PeerLost(self.hello.peer_cloud, f"{self._peer} {what}"))

    # Frames.

    async def _read(self, lane: _Lane) -> None:
        while data := await lane.connection.read():
            received_ns = steady_ns()
            lane.heard_s = time.monotonic()
            self.heartbeat.heard()
            self._is_known = True
            self._handle(decode(data), len(data), received_ns)

    def _handle(self, frame: Frame, frame_bytes: int, received_ns: int) -> None:
        match frame:
            case Chunk() if self.settings.num_stripes:
                with self._changed:
                    self._ack_due = True
                    if self._inbox.put(frame, frame_bytes):
                        self._changed.notify_all()
                self._wake(CONTROL_LANE)
            case Ack():
                with self._changed:
                    self._outbox.acknowledge(frame, now_s=time.monotonic())
                    self._changed.notify_all()
                self._wake_all()
            case Ping() | Pong():
                rtt_s = self.heartbeat.take(frame, received_ns=received_ns)
                if rtt_s is not None:
                    with self._changed:
                        self._flight.observe_rtt(rtt_s, now_s=time.monotonic())
                self._wake(CONTROL_LANE)
            case Abort():
                self._part(Aborted(frame.cloud, frame.reason))
            case Close():
                self._part(LinkClosed(f"{self._peer} has closed the link"))
            case Notice() | Chunk():
                raise FrameError(f"a {type(frame).__name__.lower()}, which has no place on this link")

    def _part(self, error: Aborted | LinkClosed) -> None:
        """The peer has said its last word; ours, if it is not said yet, is the answer."""
        self._parted.set()
        self.fail(error, last_word=Close())
        if isinstance(error, Aborted) and self._on_abort is not None:
            self._on_abort(error)

    async def _write_chunks(self, number: int, lane: _Lane) -> None:
        # A connection that was replaced must take no more: the new one would be thought to carry it.
        while self.failure is None and not lane.hang_up.is_set():
            lane.wake.clear()
            with self._changed:
                frame = self._outbox.next_frame(number, now_s=time.monotonic())
            if frame is None:
                await lane.wake.wait()
            else:
                await lane.connection.write(frame)
        await lane.hang_up.wait()

    async def _write_control(self, lane: _Lane) -> None:
        is_last = False
        while not is_last and not lane.hang_up.is_set():
            lane.wake.clear()
            is_last = self.failure is not None
            for frame in self._due_frames():
                await lane.connection.write(encode(frame))
            if not is_last:
                await self._pause(lane)
        await self._parted.wait()
        if self._dials:
            # The listening end hangs up, because what it wrote before that arrives; ours might not.
            await lane.hang_up.wait()

    def _due_frames(self) -> list[ControlFrame]:
        """All that the control connection has to say now."""
        with self._changed:
            acks = [self._inbox.ack()] if self._ack_due else []
            self._ack_due = False
        last_words = [] if self.last_word is None else [self.last_word]
        return [*acks, *self.heartbeat.due(), *last_words]

    async def _pause(self, lane: _Lane) -> None:
        """Gather acknowledgements; afterwards a ping is due even if nothing else happens."""
        await asyncio.sleep(ACK_INTERVAL_S)
        ping = asyncio.get_running_loop().call_later(self.heartbeat.interval_s, lane.wake.set)
        await lane.wake.wait()
        ping.cancel()

    def _wake(self, number: int) -> None:
        if number in self._lanes:
            self._lanes[number].wake.set()

    def _wake_all(self) -> None:
        for lane in self._lanes.values():
            lane.wake.set()
        if self.failure is not None:
            self.ended.set()


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
