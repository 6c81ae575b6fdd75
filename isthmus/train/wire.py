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
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Final, Literal, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError
from torch import Tensor

from isthmus.codec.base import flat_bytes
from isthmus.errors import FrameError
from isthmus.events import Span, steady_s
from isthmus.plan.pipeline_parts import HIDDEN
from isthmus.plan.types import (
    Carried,
    Event,
    Facts,
    Lost,
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
from isthmus.wan.link import Link, LinkState, OnState
from isthmus.wan.packet import Buffer, Packet

_POLL_S: Final = 0.2
_MAX_NUM_DIMENSIONS: Final = 3
_MAX_SHOWN: Final = 200
# What the strategy has coded itself crosses as bytes.
_TYPES: Final = {**DTYPES, "uint8": torch.uint8}
_NAMES: Final = {dtype: name for name, dtype in _TYPES.items()}
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
    MessageKind.CREDIT: "facts",
    MessageKind.COVERED: "facts",
    MessageKind.IDS: "ids",
    MessageKind.DELTA: "delta",
    MessageKind.COMMIT: "commit",
    MessageKind.STATE: "state",
}
_CARRIES_HIDDEN: Final = frozenset({MessageKind.ACTIVATION, MessageKind.EVALUATION, MessageKind.GRADIENT})
_TRANSFERRED: Final = _CARRIES_HIDDEN.union(
    {MessageKind.IDS, MessageKind.DELTA, MessageKind.COMMIT, MessageKind.STATE}
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A member that was lost is there again, at the other end of a new wire."""

    wire: "Wire"


Inbox = queue.SimpleQueue[Event | Delivery | Failure | Met]
"""Everything that a member must take in, in the order of arrival."""


class Observer(Protocol):
    """Takes in what a member's scheduler, actor and wires report."""

    def tell(self, fact: Facts) -> None:
        """The scheduler reports a fact."""

    def span(self, span: Span) -> None:
        """Something took its time; times are of this cloud's clock."""

    def measured(self, *, track: str, message: Message, relative_error: float, cosine: float) -> None:
        """The sender of a message measured what coding changed of it."""


class AnyWire(Protocol):
    """The path between this member and one other, as a loop knows it."""

    @property
    def cache(self) -> Cache | None:
        """What is kept of frozen layers behind this wire, at the first trained stage."""

    def open(self) -> None:
        """Start to take in what arrives."""

    def send(self, message: Message, tensors: Mapping[str, Tensor], ready: Mark) -> None:
        """Send a message once its tensors are ready."""

    def state(self, step: int) -> CodecState | None:
        """The codec state at the start of a step; None where nothing is coded."""

    def load(self, state: CodecState) -> None:
        """Continue as from the state that was taken."""

    def close(self) -> None:
        """Send what is left, then end."""

    def abandon(self) -> None:
        """Drop what is left."""


@dataclass(slots=True, eq=False)
class Wire:
    """The path between this member and one other."""

    link: Link
    _: KW_ONLY
    here: Member
    peer: Member
    inbox: Inbox
    observer: Observer
    facts: Mapping[MessageKind, type[Facts]]
    cut: CutEnd | None = None
    _is_closing: bool = field(default=False, init=False)
    _outward: ThreadPoolExecutor = field(init=False)
    _inward: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._outward = ThreadPoolExecutor(1, thread_name_prefix=f"to-{self.peer}")
        self._inward = ThreadPoolExecutor(1, thread_name_prefix=f"from-{self.peer}")

    def open(self) -> None:
        """Start to take in what arrives, and what happens to the link."""
        self.link.on_state = partial(self._note_state, self.link.on_state)
        self._inward.submit(self._receive).add_done_callback(self._report)

    def send(self, message: Message, tensors: Mapping[str, Tensor], ready: Mark) -> None:
        """Code and send a message once its tensors are ready; `Sent` follows when the link has it."""
        self._outward.submit(self._send, message, tensors, ready).add_done_callback(self._report)

    def state(self, step: int) -> CodecState | None:
        """The codec state at the start of a step, behind what is still to be coded; None without a cut."""
        if self.cut is None:
            return None
        return self._outward.submit(self.cut.state, step).result()

    def load(self, state: CodecState) -> None:
        """Continue as from the state that was taken."""
        if self.cut is not None:
            self.cut.load(state)

    @property
    def cache(self) -> Cache | None:
        """What is kept of frozen layers behind this wire, at the first trained stage."""
        return None if self.cut is None else self.cut.cache

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
        others = {name: one for name, one in tensors.items() if one.dtype in _NAMES}
        integers = {name: one for name, one in tensors.items() if name not in others}
        hidden, coded = None, None
        if self.cut is not None and message.kind in _CARRIES_HIDDEN and HIDDEN in others:
            hidden = others.pop(HIDDEN)
            coded = self.cut.encode(message, hidden, integers, after=ready)
            others = self.cut.to_host(others)
        coding_s = steady_s() - started_s
        packet = pack_message(message, integers, others, coded)
        num_bytes = self.link.send(_STREAMS[message.kind], packet, priority=message.priority)
        facts = Carried(num_bytes=num_bytes, rtt_s=self.link.counters().rtt_s or 0.0)
        if self.cut is not None and hidden is not None and coded is not None:
            self._observe("encode", message, coded, started_s, started_s + coding_s)
            facts = replace(
                facts,
                coding_s=coding_s,
                num_elements=coded.num_rows * self.cut.coding.hidden_width,
                element_bytes=hidden.dtype.itemsize,
                cosine=math.nan if coded.fidelity is None else coded.fidelity.cosine,
            )
        self.inbox.put(Sent(message, facts))

    # What arrives.

    def _receive(self) -> None:
        streams = tuple(dict.fromkeys(_STREAMS.values()))
        while not self._is_closing:
            try:
                stream, packet = self.link.receive_any(streams, timeout_s=_POLL_S)
            except TimeoutError:
                continue
            self._take(stream, packet)

    def _take(self, stream: str, packet: Packet) -> None:
        message, header = read_message(packet.header, self.facts, sender=self.peer, to=self.here)
        if _STREAMS.get(message.kind) != stream:
            raise FrameError(f"a {message.kind.value} in the stream {stream}")
        arrived_s = steady_s()
        sent_s = min(arrived_s, header.sent_s - (self.link.counters().clock_offset_s or 0.0))
        tensors, coded = self._unpack(message, header, packet)
        decoded_s = steady_s()
        if coded is not None:
            self._observe("decode", message, coded, arrived_s, decoded_s)
        if message.kind in _TRANSFERRED:
            self._span("transfer", message, sent_s, arrived_s, packet.payload_bytes)
        facts = Carried(coding_s=decoded_s - arrived_s)
        self.inbox.put(Delivery(message=message, tensors=tensors, travel_s=arrived_s - sent_s, facts=facts))

    def _unpack(
        self, message: Message, header: "MessageHeader", packet: Packet
    ) -> tuple[dict[str, Tensor], Coded | None]:
        num_parts = 0 if header.hidden is None else header.hidden[-1]
        num_integers = len(packet.buffers) - len(header.tensors) - num_parts
        if num_integers < 0:
            raise FrameError("a message whose header lists more tensors than it carries")
        integers = unpack_integers(header.integers, packet.buffers[:num_integers])
        buffers = iter(map(_as_bytes, packet.buffers[num_integers:]))
        others = {
            name: _as_tensor(next(buffers), dtype, shape) for name, (dtype, shape) in header.tensors.items()
        }
        carries_hidden = message.kind in _CARRIES_HIDDEN
        if others.keys() & {*integers, *([HIDDEN] if carries_hidden else [])}:
            raise FrameError("a message whose header lists a tensor twice")
        coded = None
        if header.hidden is not None:
            codec, dtype, num_rows, _ = header.hidden
            coded = Coded(codec, _TYPES[dtype], num_rows, tuple(buffers))
        if not carries_hidden:
            return integers | others, coded
        if self.cut is None:
            raise FrameError(f"{message.name} crosses where no cut lies between")
        hidden = self.cut.decode(message, coded, integers)
        found = integers | self.cut.to_device(others)
        return found if hidden is None else found | {HIDDEN: hidden}, coded

    # What is observed.

    def _note_state(self, before: OnState | None, peer: Member, state: LinkState, reason: str) -> None:
        """Suspect a member that does not answer; it may be heard again, so it is not lost yet."""
        if before is not None:
            before(peer, state, reason)
        if state in (LinkState.SILENT, LinkState.RECONNECTING):
            self.inbox.put(Lost(self.peer, final=False, reason=reason))

    def _observe(self, kind: str, message: Message, coded: Coded, start_s: float, end_s: float) -> None:
        if coded.codec == _RAW:
            return
        track = self._span(kind, message, start_s, end_s, sum(part.numel() for part in coded.parts))
        if coded.fidelity is not None:
            error, cosine = coded.fidelity.relative_error, coded.fidelity.cosine
            self.observer.measured(track=track, message=message, relative_error=error, cosine=cosine)

    def _span(self, kind: str, message: Message, start_s: float, end_s: float, num_bytes: int) -> str:
        """Report a span on the track from the message's sender to its receiver, which is returned."""
        receiver = self.peer if message.sender == self.here else self.here
        track = f"{message.sender.cloud}→{receiver.cloud}"
        self.observer.span(
            Span(track=track, name=message.name, kind=kind, start_s=start_s, end_s=end_s, num_bytes=num_bytes)
        )
        return track

    def _report(self, future: "Future[None]") -> None:
        error = None if future.cancelled() else future.exception()
        # Of a wire that was abandoned the end is known; the member may be there again at another one.
        if error is not None and not self._is_closing:
            self.inbox.put(Failure(member=self.peer, error=error))


_LAX: Final = Strict(False)
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Dtype = Literal["float32", "bfloat16", "float16"]
_Shape = Annotated[tuple[_Count, ...], Field(strict=False, max_length=_MAX_NUM_DIMENSIONS)]


class MessageHeader(BaseModel):
    """What a packet says of its message; a peer has written it, so that every field is checked."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    kind: Annotated[MessageKind, _LAX]
    step: _Count
    item: _Count
    sent_s: float
    codecs: dict[Literal["hidden", "gradient"], str]
    facts: str | None
    integers: Any
    tensors: dict[str, Annotated[tuple[_Dtype | Literal["uint8"], _Shape], _LAX]]
    hidden: Annotated[tuple[str, _Dtype, _Count, _Count], _LAX] | None
    """The codec, the type, and how many rows in how many parts; None without hidden states."""


def pack_message(
    message: Message, integers: Mapping[str, Tensor], others: Mapping[str, Tensor], coded: Coded | None
) -> Packet:
    """A message as its peer reads it: a header, integers, tensors as they are, and coded hidden states."""
    planes, buffers = pack_integers(integers)
    header: dict[str, object] = {
        "kind": message.kind.value,
        "step": message.step,
        "item": message.item,
        "sent_s": steady_s(),
        "codecs": dict(message.codecs),
        "facts": None if message.facts is None else pack_facts(message.facts),
        "integers": planes,
        "tensors": {name: [_NAMES[one.dtype], list(one.shape)] for name, one in others.items()},
        "hidden": None,
    }
    buffers += [_as_buffer(flat_bytes(one.detach().cpu())) for one in others.values()]
    if coded is not None:
        header["hidden"] = [coded.codec, _NAMES[coded.dtype], coded.num_rows, len(coded.parts)]
        buffers += map(_as_buffer, coded.parts)
    return Packet(header, tuple(buffers))


def read_message(
    values: object, kinds: Mapping[MessageKind, type[Facts]], *, sender: Member, to: Member
) -> tuple[Message, MessageHeader]:
    """The message that a header stands for, and what else it says; `kinds` are the facts that are due."""
    try:
        header = MessageHeader.model_validate(values)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise FrameError(f"a message with an unreadable header: {str(reason)[:_MAX_SHOWN]}") from None
    kind, due = header.kind, kinds.get(header.kind)
    if (due is None) != (header.facts is None):
        raise FrameError(f"a {kind.value} with facts that it should not have, or without")
    facts, codecs = None if due is None else unpack_facts(header.facts, due), tuple(header.codecs.items())
    return Message(kind, header.step, header.item, sender, (to,), facts, codecs), header


def _as_tensor(part: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A view of bytes as what the header says of them."""
    if math.prod(shape) * _TYPES[dtype].itemsize != part.numel():
        raise FrameError(f"a tensor of shape {shape} in {part.numel()} bytes")
    return part.view(_TYPES[dtype]).view(shape)


def _as_bytes(buffer: Buffer) -> Tensor:
    """A view of a buffer as bytes."""
    view = memoryview(buffer)
    return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def _as_buffer(part: Tensor) -> Buffer:
    """A view of the bytes of a tensor on the host."""
    array: np.ndarray[Any, Any] = part.numpy()
    return array.data if array.size else b""
