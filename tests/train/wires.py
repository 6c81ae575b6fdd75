"""Two members joined by wires whose line a test holds in its hands."""

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from torch import Tensor

from isthmus.plan.pipeline_parts import FACTS
from isthmus.plan.types import Arrived, Facts, Member, Message, MessageKind, Sent
from isthmus.train.device import Device, Mark
from isthmus.train.integers import pack_integers
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_role import cut_end
from isthmus.train.wire import Delivery, Failure, Inbox, Wire
from isthmus.wan.link import OnState
from isthmus.wan.packet import Packet, pack, unpack, wire_bytes
from tests.train.chain import CLOUDS, Record

PATIENCE_S = 60.0

Spoil = Callable[[str, Packet], tuple[str, Packet]]
"""Changes a packet, and the stream that it is in, on its way."""


def over_the_line(packet: Packet) -> Packet:
    """The packet as its receiver finds it."""
    return unpack(memoryview(bytearray(b"".join(pack(packet).segments))))


def with_integers(packet: Packet, tensors: Mapping[str, Tensor], *, has_hidden: bool = True) -> Packet:
    """The packet with other integers, as they are, and with or without hidden states."""
    old: Any = packet.header["integers"]
    num_old = sum(not about.get("like_ids") for about in old.values())
    planes, buffers = pack_integers(tensors)
    rest = list(packet.buffers)[num_old:] if has_hidden else []
    header = {**packet.header, "integers": planes, "hidden": packet.header["hidden"] if has_hidden else None}
    return over_the_line(Packet(header, [*buffers, *rest]))


@dataclass
class Line:
    """Stands for one end of a link: keeps what is sent, and gives what the test puts in."""

    sent: list[tuple[str, Packet]] = field(default_factory=list)
    on_state: OnState | None = None
    arriving: "queue.SimpleQueue[tuple[str, Packet]]" = field(default_factory=queue.SimpleQueue)

    def send(self, stream: str, packet: Packet, *, priority: int) -> int:  # noqa: ARG002
        self.sent.append((stream, packet))
        return wire_bytes(pack(packet).num_bytes)

    def receive_any(self, streams: tuple[str, ...], *, timeout_s: float) -> tuple[str, Packet]:  # noqa: ARG002
        try:
            # A wire that closes ends when its wait does.
            return self.arriving.get(timeout=min(timeout_s, 0.005))
        except queue.Empty:
            raise TimeoutError from None

    def counters(self) -> Any:
        return SimpleNamespace(clock_offset_s=None, rtt_s=0.01)


class End:
    """One member of a config, and its wire to the other one."""

    def __init__(self, agreed: PipelineConfig, here: Member, peer: Member, *, hidden_width: int) -> None:
        self.member = here
        self.peer = peer
        self.line = Line()
        self.inbox = Inbox()
        self.record = Record()
        line: Any = self.line
        stages = agreed.pipeline.stage_of(here), agreed.pipeline.stage_of(peer)
        cut = cut_end(agreed, min(stages), Device("cpu"), hidden_width, is_sender=stages[0] < stages[1])
        self.wire = Wire(
            line, here=here, peer=peer, inbox=self.inbox, observer=self.record, facts=FACTS, cut=cut
        )

    def send(
        self,
        kind: MessageKind,
        tensors: Mapping[str, Tensor],
        *,
        step: int = 3,
        item: int = 5,
        facts: Facts | None = None,
        codecs: tuple[tuple[str, str], ...] = (),
    ) -> tuple[Sent, str, Packet]:
        """Send a message; gives what the wire reports, and the packet as its receiver finds it."""
        message = Message(kind, step, item, self.member, (self.peer,), facts, codecs)
        self.wire.send(message, tensors, Mark())
        sent = self._take()
        assert isinstance(sent, Sent)
        stream, packet = self.line.sent.pop()
        return sent, stream, over_the_line(packet)

    def receive(self, stream: str, packet: Packet) -> Delivery:
        """What a packet becomes here; an error of the wire is raised."""
        self.line.arriving.put((stream, packet))
        found = self._take()
        assert isinstance(found, Delivery)
        return found

    def _take(self) -> object:
        found = self.inbox.get(timeout=PATIENCE_S)
        if isinstance(found, Failure):
            raise found.error
        assert not isinstance(found, Arrived | None)
        return found


class Joined:
    """The members at both sides of a cut, with wires to each other."""

    def __init__(self, agreed: PipelineConfig, *, hidden_width: int, cut: int = 0) -> None:
        before, behind = Member(CLOUDS[cut]), Member(CLOUDS[cut + 1])
        self.before = End(agreed, before, behind, hidden_width=hidden_width)
        self.behind = End(agreed, behind, before, hidden_width=hidden_width)

    def down(
        self, kind: MessageKind, tensors: Mapping[str, Tensor], *, spoil: Spoil | None = None, **options: Any
    ) -> Delivery:
        """Carry a message to the stage behind."""
        return _carry(self.before, self.behind, kind, tensors, spoil, options)

    def up(
        self, kind: MessageKind, tensors: Mapping[str, Tensor], *, spoil: Spoil | None = None, **options: Any
    ) -> Delivery:
        """Carry a message to the stage before."""
        return _carry(self.behind, self.before, kind, tensors, spoil, options)

    def __enter__(self) -> Self:
        for end in (self.before, self.behind):
            end.wire.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self.before, self.behind):
            end.wire.close()


def _carry(
    sender: End,
    receiver: End,
    kind: MessageKind,
    tensors: Mapping[str, Tensor],
    spoil: Spoil | None,
    options: Mapping[str, Any],
) -> Delivery:
    _, stream, packet = sender.send(kind, tensors, **options)
    return receiver.receive(*(spoil(stream, packet) if spoil is not None else (stream, packet)))
