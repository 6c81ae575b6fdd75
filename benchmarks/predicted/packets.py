"""Packets of a cut, made and read by the wires of the product: what they weigh, and how long it takes."""

import statistics
import time
from dataclasses import dataclass, fields
from typing import Final, Self

import torch
from crossing import BEYOND, HERE, activation, gradient
from member import Record, pipeline_config
from queue_link import queue_link
from torch import Tensor

from isthmus.plan.codecs import Crossing
from isthmus.plan.pipeline_parts import FACTS, HIDDEN
from isthmus.plan.types import Carried, Member, Sent
from isthmus.train.device import Device
from isthmus.train.pipeline import TARGETS
from isthmus.train.pipeline_role import cut_end
from isthmus.train.wire import Delivery, Inbox, Wire
from isthmus.wan.packet import Packet
from predicted.cases import Case

_NUM_WARM_UPS: Final = 3
_NUM_ROUNDS: Final = _NUM_WARM_UPS + 10
_PEER: Final = {HERE: BEYOND, BEYOND: HERE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packets:
    """Packets of one cut at one cloud: bytes on the line, and seconds to make and to read one, each way."""

    forward_bytes: int
    backward_bytes: int
    make_forward_s: float
    read_forward_s: float
    make_backward_s: float
    read_backward_s: float


def weigh_packets(case: Case, width: int) -> Packets:
    """Make and read packets as a cut does, both ends here."""
    with _Cut(case, width) as cut:
        rounds = [(cut.cross(HERE, number), cut.cross(BEYOND, number)) for number in range(_NUM_ROUNDS)]
    there, back = zip(*rounds[_NUM_WARM_UPS:], strict=True)
    return Packets(
        forward_bytes=there[0].num_bytes,
        backward_bytes=back[0].num_bytes,
        make_forward_s=statistics.median(one.make_s for one in there),
        read_forward_s=statistics.median(one.read_s for one in there),
        make_backward_s=statistics.median(one.make_s for one in back),
        read_backward_s=statistics.median(one.read_s for one in back),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossed:
    """One message: its bytes on the line, and the seconds to make its packet and to read it."""

    num_bytes: int
    make_s: float
    read_s: float


class _Cut:
    """Both ends of a cut, joined by a link that takes no time."""

    def __init__(self, case: Case, width: int) -> None:
        self._device = Device(case.stages.device)
        self._pair = case.pair
        batch = case.stages.source(1).batch
        values = {one.name: getattr(batch, one.name) for one in fields(batch)}
        self._integers = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self._integers[TARGETS] = torch.tensor([batch.num_targets, batch.num_targets])
        self._hidden = torch.randn(*batch.ids.shape, width).to(self._device.torch_device)
        self._made_s = 0.0
        self._inboxes = {HERE: Inbox(), BEYOND: Inbox()}
        ends = queue_link(self._note, self._note)
        config = pipeline_config(
            (HERE.cloud, BEYOND.cloud),
            pair=case.pair,
            crossing=Crossing(num_rows=batch.ids.numel(), width=width),
            num_steps=1,
            num_microbatches=_NUM_ROUNDS,
        )
        self._wires = {
            here: Wire(
                end,
                here=here,
                peer=_PEER[here],
                inbox=self._inboxes[here],
                observer=Record(),
                facts=FACTS,
                cut=cut_end(config, 0, self._device, width, is_sender=here == HERE),
            )
            for here, end in zip(_PEER, ends, strict=True)
        }

    def cross(self, sender: Member, number: int) -> _Crossed:
        """Send an activation, or the gradient of the one with this number."""
        make = activation if sender == HERE else gradient
        message = make(self._pair, number)
        tensors = {HIDDEN: self._hidden, **(self._integers if sender == HERE else {})}
        started_s = time.perf_counter()
        self._wires[sender].send(message, tensors, self._device.mark())
        arrived = self._inboxes[_PEER[sender]].get()
        ended_s = time.perf_counter()
        sent = self._inboxes[sender].get()
        if not isinstance(arrived, Delivery) or not isinstance(sent, Sent):
            raise TypeError(f"{message.name} does not cross: {arrived}, {sent}")
        num_bytes = sent.facts.num_bytes if isinstance(sent.facts, Carried) else 0
        return _Crossed(num_bytes=num_bytes, make_s=self._made_s - started_s, read_s=ended_s - self._made_s)

    def _note(self, _stream: str, _packet: Packet) -> None:
        self._made_s = time.perf_counter()

    def __enter__(self) -> Self:
        for wire in self._wires.values():
            wire.open()
        return self

    def __exit__(self, *_: object) -> None:
        for wire in self._wires.values():
            wire.close()
