"""What crosses between stages, as packets: micro-batches, their gradients, and what bottlenecks begin with.

    forward      down   the integers of a micro-batch, and what crosses the cut; evaluations too
    backward     up     the gradient of what crossed
    begin        down   what a bottleneck begins with, once

Activations of training and of evaluation share one stream: what codecs learn from them depends on the order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from isthmus.codec.base import flat_bytes
from isthmus.errors import FrameError
from isthmus.model.boundary import Batch
from isthmus.plan.types import Arrived, Pass, Send
from isthmus.train.crossing.coded import (
    Coded,
    as_buffer,
    describe_tensor,
    read_coded,
    read_count,
    read_tensor,
)
from isthmus.train.crossing.integers import pack_batch, unpack_batch
from isthmus.wan.packet import Packet

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
BEGIN: Final = "begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A micro-batch between stages: integers on the host, what crosses on the device.

    `num_step_targets` are the targets of the whole step. The activations of the sequences in `held` are in
    the cache of the first trained stage; where that is all of them, nothing crosses.
    """

    batch: Batch
    num_step_targets: int
    crossing: Tensor | None = None
    held: tuple[int, ...] = ()

    @property
    def is_held(self) -> bool:
        """Whether there is nothing to compute below the first trained stage."""
        return len(self.held) == len(self.batch.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of what crossed; with a mask, the rows of padding stay behind."""

    values: Tensor
    mask: Tensor | None


def pack_microbatch(microbatch: Microbatch, coded: Coded | None, *, about: Send, sent_s: float) -> Packet:
    """The integers of a micro-batch, and what crosses the cut, if anything does."""
    packed = pack_batch(microbatch.batch)
    header = {
        **_address(about, sent_s),
        **packed.header,
        "evaluation": about.kind is Pass.EVALUATION,
        "num_step_targets": microbatch.num_step_targets,
        "held": list(microbatch.held),
        "crossing": None if coded is None else coded.describe(),
    }
    return Packet(header, (*packed.buffers, *(coded.buffers() if coded is not None else ())))


def unpack_microbatch(packet: Packet) -> tuple[Microbatch, Coded | None]:
    """The integers of a micro-batch, and what crossed, as it came."""
    about, coded, buffers = packet.header.get("crossing"), None, packet.buffers
    if about is not None:
        coded, buffers = read_coded(about, buffers)
    batch = unpack_batch(packet.header, buffers)
    found = Microbatch(
        batch=batch,
        num_step_targets=read_count(packet.header, "num_step_targets"),
        held=_held(packet.header.get("held"), num_sequences=len(batch.ids)),
    )
    if (coded is None) != found.is_held:
        raise FrameError("a micro-batch without what crosses, or with what is held already")
    return found, coded


def pack_gradient(coded: Coded, *, about: Send, sent_s: float) -> Packet:
    """The gradient of what crossed."""
    return Packet({**_address(about, sent_s), "crossing": coded.describe()}, coded.buffers())


def unpack_gradient(packet: Packet) -> Coded:
    """A gradient as it came; whoever sent the activation knows its shape."""
    coded, rest = read_coded(packet.header.get("crossing"), packet.buffers)
    if rest:
        raise FrameError("a gradient with buffers that it does not speak of")
    return coded


def pack_begin(tensors: Mapping[str, Tensor]) -> Packet:
    """What a bottleneck begins with: tensors by name, on the host."""
    header = {"tensors": {name: describe_tensor(tensor) for name, tensor in tensors.items()}}
    return Packet(header, [as_buffer(flat_bytes(tensor)) for tensor in tensors.values()])


def unpack_begin(packet: Packet) -> dict[str, Tensor]:
    """The tensors by name."""
    about = packet.header.get("tensors")
    if not isinstance(about, dict) or len(about) != len(packet.buffers):
        raise FrameError("a bottleneck that begins with other tensors than it says")
    return {
        name: read_tensor(one, buffer)
        for (name, one), buffer in zip(about.items(), packet.buffers, strict=True)
    }


def read_address(packet: Packet, stream: str) -> Arrived:
    """What has arrived, as the scheduler is told."""
    header = packet.header
    kind = Pass.BACKWARD
    if stream == FORWARD:
        kind = Pass.EVALUATION if header.get("evaluation") is True else Pass.FORWARD
    return Arrived(kind=kind, step=read_count(header, "step"), microbatch=read_count(header, "microbatch"))


def read_sent_s(packet: Packet) -> float:
    """When it was sent, by the sender's clock."""
    sent_s = packet.header.get("sent_s")
    if not isinstance(sent_s, float):
        raise FrameError("a packet that does not say when it was sent")
    return sent_s


def _address(about: Send, sent_s: float) -> dict[str, object]:
    return {"step": about.step, "microbatch": about.microbatch, "sent_s": sent_s}


def _held(found: object, *, num_sequences: int) -> tuple[int, ...]:
    is_list = isinstance(found, list) and all(type(one) is int for one in found)
    if not isinstance(found, list) or not is_list or not set(found) <= set(range(num_sequences)):
        raise FrameError("a micro-batch that does not say which of its sequences are held")
    return tuple(sorted(set(found)))
