"""Carries named tensors to and from one member, off the computing thread.

    actor ──► send ──► code, copy to the host, pack ──► Link ──► unpack, copy to the device, decode ──► inbox
                       one thread                                one thread

Integers cross narrowed and without loss. Hidden states are coded by the end of the cut that lies between the
two members; all other tensors cross as they are. What was measured on the way comes back as `Sent` and
`Arrived` facts.
"""

import math
import queue
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from isthmus.codec.base import flat_bytes
from isthmus.errors import FrameError
from isthmus.events import Span, steady_s
from isthmus.plan.pipeline_parts import GRADIENT, HIDDEN
from isthmus.plan.types import (
    Carried,
    Event,
    Facts,
    Member,
    Message,
    MessageKind,
    Sent,
    pack_facts,
    unpack_facts,
)
from isthmus.train.coding import DTYPES, CodecState, Coded, CutEnd
from isthmus.train.device import Mark
from isthmus.train.frozen_cache import Cache
from isthmus.train.integers import pack_integers, unpack_integers
from isthmus.wan.link import Link
from isthmus.wan.packet import Buffer, Packet

_POLL_S: Final = 0.2
_MAX_NUM_DIMENSIONS: Final = 3
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_RAW: Final = "raw"
# The first is taken in first, so that a verdict need not wait until activations of the next step are decoded.
_STREAMS: Final = {
    MessageKind.TALLY: "facts",
    MessageKind.VERDICT: "facts",
    MessageKind.EVALUATED: "facts",
    MessageKind.ACTIVATION: "forward",
    # What codecs learn depends on the order of activations, so all of them share one stream.
    MessageKind.EVALUATION: "forward",
    MessageKind.GRADIENT: "backward",
    MessageKind.BASIS: "basis",
}
_CARRIES_HIDDEN: Final = frozenset({MessageKind.ACTIVATION, MessageKind.EVALUATION, MessageKind.GRADIENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A message that has arrived, with its tensors on the device."""

    message: Message
    tensors: Mapping[str, Tensor]
    travel_s: float
    facts: Carried


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A wire has ended: the member at its other end is lost, or broke the protocol."""

    member: Member
    error: BaseException


class Inbox:
    """Everything that a member must take in, in the order of arrival: events, deliveries and failures."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Event | Delivery | Failure] = queue.SimpleQueue()

    def put(self, item: Event | Delivery | Failure) -> None:
        """Add an item, from any thread."""
        self._items.put(item)

    def take(self, *, timeout_s: float | None = None) -> Event | Delivery | Failure | None:
        """The next item; waits for it, None when the time is over."""
        try:
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            return None


class WireObserver(Protocol):
    """Takes in what wires report beside their facts."""

    def span(self, span: Span) -> None:
        """Something took its time; times are of this cloud's clock."""

    def measured(self, *, track: str, message: Message, relative_error: float, cosine: float) -> None:
        """The sender of a message measured what coding changed of it."""


class Wire:
    """The path between this member and one other."""

    def __init__(
        self,
        link: Link,
        *,
        here: Member,
        peer: Member,
        inbox: Inbox,
        observer: WireObserver,
        facts: Mapping[MessageKind, type[Facts]],
        cut: CutEnd | None = None,
    ) -> None:
        self.peer = peer
        self._link = link
        self._here = here
        self._inbox = inbox
        self._observer = observer
        self._facts = facts
        self._cut = cut
        self._is_closing = False
        self._outward = ThreadPoolExecutor(1, thread_name_prefix=f"to-{peer}")
        self._inward = ThreadPoolExecutor(1, thread_name_prefix=f"from-{peer}")

    def open(self) -> None:
        """Start to take in what arrives."""
        self._watch(self._inward.submit(self._receive))

    def send(self, message: Message, tensors: Mapping[str, Tensor], ready: Mark) -> None:
        """Code and send a message once its tensors are ready; `Sent` follows when the link has it."""
        self._watch(self._outward.submit(self._send, message, tensors, ready))

    def state(self, step: int) -> CodecState | None:
        """The codec state at the start of a step, behind what is still to be coded; None without a cut."""
        if self._cut is None:
            return None
        return self._outward.submit(self._cut.state, step).result()

    def load(self, state: CodecState) -> None:
        """Continue as from the state that was taken."""
        if self._cut is not None:
            self._cut.load(state)

    @property
    def cache(self) -> Cache | None:
        """What is kept of frozen layers behind this wire, at the first trained stage."""
        return None if self._cut is None else self._cut.cache

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

    # What leaves.

    def _send(self, message: Message, tensors: Mapping[str, Tensor], ready: Mark) -> None:
        started_s = steady_s()
        integers = {name: one for name, one in tensors.items() if not one.is_floating_point()}
        hidden, coded = tensors.get(HIDDEN), None
        if hidden is not None and self._cut is not None and message.kind in _CARRIES_HIDDEN:
            coded = self._cut.encode(message, hidden, integers, after=ready)
        coding_s = steady_s() - started_s
        packet = self._pack(message, tensors, integers, coded)
        num_bytes = self._link.send(_STREAMS[message.kind], packet, priority=message.priority)
        if coded is not None:
            self._note_coded(
                "encode", f"{self._here.cloud}→{self.peer.cloud}", message, coded, started_s, coding_s
            )
        self._inbox.put(Sent(message, self._carried(coded, hidden, coding_s, num_bytes)))

    def _pack(
        self,
        message: Message,
        tensors: Mapping[str, Tensor],
        integers: Mapping[str, Tensor],
        coded: Coded | None,
    ) -> Packet:
        planes, buffers = pack_integers(integers)
        others = {
            name: one
            for name, one in tensors.items()
            if one.is_floating_point() and not (name == HIDDEN and coded is not None)
        }
        header = {
            "kind": message.kind.value,
            "step": message.step,
            "item": message.item,
            "sent_s": steady_s(),
            "codecs": dict(message.codecs),
            "facts": None if message.facts is None else pack_facts(message.facts),
            "integers": planes,
            "tensors": {name: [_NAMES[one.dtype], list(one.shape)] for name, one in others.items()},
            HIDDEN: None if coded is None else _describe(coded),
        }
        buffers += [_as_buffer(flat_bytes(one.detach().cpu())) for one in others.values()]
        buffers += [] if coded is None else [_as_buffer(part) for part in coded.parts]
        return Packet(header, tuple(buffers))

    def _carried(
        self, coded: Coded | None, hidden: Tensor | None, coding_s: float, num_bytes: int
    ) -> Carried:
        rtt_s = self._link.counters().rtt_s or 0.0
        if coded is None or hidden is None or self._cut is None:
            return Carried(rtt_s=rtt_s, num_bytes=num_bytes)
        return Carried(
            coding_s=coding_s,
            rtt_s=rtt_s,
            num_bytes=num_bytes,
            num_elements=coded.num_rows * self._cut.coding.hidden_width,
            element_bytes=hidden.dtype.itemsize,
            cosine=math.nan if coded.fidelity is None else coded.fidelity.cosine,
        )

    # What arrives.

    def _receive(self) -> None:
        streams = tuple(dict.fromkeys(_STREAMS.values()))
        while not self._is_closing:
            try:
                stream, packet = self._link.receive_any(streams, timeout_s=_POLL_S)
            except TimeoutError:
                continue
            self._take(stream, packet)

    def _take(self, stream: str, packet: Packet) -> None:
        message = self._message(stream, packet)
        arrived_s = steady_s()
        sent_s = _number(packet, "sent_s") - (self._link.counters().clock_offset_s or 0.0)
        sent_s = min(arrived_s, sent_s)
        tensors, coded = self._unpack(message, packet)
        if coded is not None:
            self._note_coded(
                "decode",
                f"{self.peer.cloud}→{self._here.cloud}",
                message,
                coded,
                arrived_s,
                steady_s() - arrived_s,
            )
        if message.kind in _CARRIES_HIDDEN:
            self._note_transfer(message, packet, sent_s, arrived_s)
        self._inbox.put(
            Delivery(
                message=message,
                tensors=tensors,
                travel_s=arrived_s - sent_s,
                facts=Carried(coding_s=steady_s() - arrived_s),
            )
        )

    def _message(self, stream: str, packet: Packet) -> Message:
        header = packet.header
        try:
            kind = MessageKind(str(header.get("kind")))
        except ValueError:
            raise FrameError(f"a message of kind {str(header.get('kind'))[:50]!r}") from None
        if _STREAMS.get(kind) != stream:
            raise FrameError(f"a {kind.value} in the stream {stream}")
        facts, text = self._facts.get(kind), header.get("facts")
        if (facts is None) != (text is None):
            raise FrameError(f"a {kind.value} with facts that it should not have, or without")
        return Message(
            kind,
            _count(packet, "step"),
            _count(packet, "item"),
            self.peer,
            (self._here,),
            None if facts is None else unpack_facts(text, facts),
            _codecs(header.get("codecs")),
        )

    def _unpack(self, message: Message, packet: Packet) -> tuple[dict[str, Tensor], Coded | None]:
        header, buffers = packet.header, list(packet.buffers)
        coded = None
        if header.get(HIDDEN) is not None:
            coded, buffers = _read_coded(header[HIDDEN], buffers)
        others = header.get("tensors")
        if not isinstance(others, dict) or len(others) > len(buffers):
            raise FrameError("a message whose header lists no tensors, or more than it carries")
        num_integers = len(buffers) - len(others)
        integers = unpack_integers(header.get("integers"), buffers[:num_integers])
        tensors: dict[str, Tensor] = dict(integers)
        if others.keys() & {*integers, *([HIDDEN] if message.kind in _CARRIES_HIDDEN else [])}:
            raise FrameError("a message whose header lists a tensor twice")
        for (name, about), buffer in zip(others.items(), buffers[num_integers:], strict=True):
            tensors[name] = _read_tensor(about, buffer)
        if message.kind in _CARRIES_HIDDEN:
            if self._cut is None:
                raise FrameError(f"{message.name} crosses where no cut lies between")
            hidden = self._cut.decode(message, coded, integers)
            tensors |= {} if hidden is None else {HIDDEN: hidden}
        return tensors, coded

    # What is told.

    def _note_coded(
        self, kind: str, track: str, message: Message, coded: Coded, start_s: float, coding_s: float
    ) -> None:
        if coded.codec == _RAW:
            return
        self._observer.span(
            Span(
                track=track,
                name=message.name,
                kind=kind,
                start_s=start_s,
                end_s=start_s + coding_s,
                num_bytes=sum(part.numel() for part in coded.parts),
            )
        )
        if coded.fidelity is not None:
            self._observer.measured(
                track=track,
                message=message,
                relative_error=coded.fidelity.relative_error,
                cosine=coded.fidelity.cosine,
            )

    def _note_transfer(self, message: Message, packet: Packet, sent_s: float, arrived_s: float) -> None:
        self._observer.span(
            Span(
                track=f"{self.peer.cloud}→{self._here.cloud}",
                name=message.name,
                kind="transfer",
                start_s=sent_s,
                end_s=arrived_s,
                num_bytes=packet.payload_bytes,
            )
        )

    def _watch(self, future: "Future[None]") -> None:
        future.add_done_callback(self._report)

    def _report(self, future: "Future[None]") -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._inbox.put(Failure(member=self.peer, error=error))


def _describe(coded: Coded) -> list[object]:
    return [coded.codec, _NAMES[coded.dtype], coded.num_rows, len(coded.parts)]


def _read_coded(about: object, buffers: list[Buffer]) -> tuple[Coded, list[Buffer]]:
    """What a header describes, from the last of the buffers, and the buffers before it."""
    match about:
        case [str(codec), str(kind), int(num_rows), int(num_parts)] if kind in DTYPES:
            first = len(buffers) - num_parts
            if num_rows >= 0 and 0 <= first <= len(buffers):
                parts = tuple(map(_as_bytes, buffers[first:]))
                coded = Coded(codec, DTYPES[kind], num_rows, parts)
                return coded, buffers[:first]
    raise FrameError(f"no hidden states are described by {str(about)[:100]}")


def _read_tensor(about: object, buffer: Buffer) -> Tensor:
    """The tensor that a header describes, its size checked."""
    match about:
        case [str(kind), list(shape)] if kind in DTYPES and len(shape) <= _MAX_NUM_DIMENSIONS:
            dtype = DTYPES[kind]
        case _:
            raise FrameError(f"no tensor is described by {str(about)[:100]}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise FrameError(f"a tensor of shape {shape}")
    part = _as_bytes(buffer)
    if math.prod(shape) * dtype.itemsize != part.numel():
        raise FrameError(f"a tensor of shape {shape} in {part.numel()} bytes")
    return part.view(dtype).view(shape)


def _codecs(found: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, dict) or not set(found) <= {HIDDEN, GRADIENT}:
        raise FrameError("a message that does not say how it is coded")
    if not all(isinstance(text, str) for text in found.values()):
        raise FrameError("a message with a codec that is no text")
    return tuple(found.items())


def _count(packet: Packet, key: str) -> int:
    value = packet.header.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise FrameError(f"a message whose {key} is no count")
    return value


def _number(packet: Packet, key: str) -> float:
    value: Any = packet.header.get(key)
    if not isinstance(value, float) or not math.isfinite(value):
        raise FrameError(f"a message whose {key} is no number")
    return value


def _as_bytes(buffer: Buffer) -> Tensor:
    """A view of a buffer as bytes."""
    view = memoryview(buffer)
    return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def _as_buffer(part: Tensor) -> Buffer:
    """A view of the bytes of a tensor on the host."""
    array: np.ndarray[Any, Any] = part.numpy()
    return array.data if array.size else b""
