"""The stage behind the measured one: the product's loop and wire around an actor that computes nothing.

Every activation is answered by a gradient that was coded beforehand, every step by a tally. It runs in the
same process behind a link that copies and nothing more, or in another one behind TLS, gRPC and an emulated
WAN.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from crossing import BEYOND, HERE, coded_both_ways
from member import Record
from queue_link import queue_link
from torch import Tensor

from isthmus.errors import LinkClosed
from isthmus.plan.end_of_step import Reduced, Seen, Updated, Verdict
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import FACTS, HIDDEN
from isthmus.plan.types import Facts, Gathered, Message, MessageKind, Work, WorkKind
from isthmus.train.coding import Coded, CutEnd, Integers
from isthmus.train.device import Device, Mark
from isthmus.train.loop import Loop
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_role import cut_end
from isthmus.train.wire import Inbox, Wire
from isthmus.wan.link import Link
from isthmus.wan.packet import MAX_CHUNK_BYTES, Packet, encode_chunk, pack

_NOTHING: Final = torch.empty(0)
_CPU: Final = "cpu"


class FarActor:
    """Computes nothing; what it sends is coded already."""

    def run(self, work: Work) -> Facts | None:
        """End a work at once, with the facts that it must have."""
        match work.kind, work.facts:
            case WorkKind.REDUCE, Seen() as seen:
                return Gathered(of=(Reduced(seen=seen, loss_sum=0.0, squared_norms=()),))
            case WorkKind.UPDATE, Verdict() as verdict:
                return Gathered(of=(Updated(verdict=verdict),))
        return None

    def tensors(self, message: Message) -> tuple[Mapping[str, Tensor], Mark]:
        """What stands for a gradient."""
        return ({HIDDEN: _NOTHING} if message.kind is MessageKind.GRADIENT else {}), Mark()

    def take(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """Leave what has arrived alone."""

    def drop(self, message: Message) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class PreparedCut(CutEnd):
    """The receiving end of a cut that decodes nothing and always sends the same gradient."""

    gradient: Coded | None = None

    def encode(self, message: Message, hidden: Tensor, integers: Integers, *, after: Mark) -> Coded:
        """The gradient that was made beforehand."""
        del hidden, integers, after
        if self.gradient is None:
            raise ValueError(f"no gradient was made for {message.name}")
        return self.gradient

    def decode(self, message: Message, coded: Coded | None, integers: Integers) -> Tensor:
        """Leave an activation as it is."""
        del message, coded, integers
        return _NOTHING


def prepared_gradient(config: PipelineConfig, *, shape: tuple[int, int, int], dtype: torch.dtype) -> Coded:
    """A gradient of this shape as the far end of the cut would have coded it."""
    hidden = 1e-4 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return coded_both_ways(config, 0, hidden.to(dtype), Device(_CPU))[1]


def answer(config: PipelineConfig, link: Link, gradient: Coded, *, width: int) -> None:
    """Be the far end until the measured stage stops."""
    inbox, device = Inbox(), Device(_CPU)
    coding = cut_end(config, 0, device, width, is_sender=False).coding
    wire = Wire(
        link,
        here=BEYOND,
        peer=HERE,
        inbox=inbox,
        observer=Record(),
        facts=FACTS,
        cut=PreparedCut(coding=coding, device=device, is_sender=False, gradient=gradient),
    )
    scheduler = PipelineScheduler(config.pipeline, BEYOND)
    with Loop(scheduler, FarActor(), {HERE: wire}, inbox, tell=lambda _: None) as loop:
        loop.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class FarThread:
    """A far end on a thread of this process, behind a link that copies."""

    shape: tuple[int, int, int]
    dtype: torch.dtype

    @contextmanager
    def begin(self, config: PipelineConfig) -> Iterator[Any]:
        """Have it answer one run of the measured stage; gives the link to it."""
        near, far = queue_link(_copy)
        gradient = prepared_gradient(config, shape=self.shape, dtype=self.dtype)

        def watch(future: "Future[None]") -> None:
            error = future.exception()
            if error is not None:
                far.fail(error)

        with ThreadPoolExecutor(1, thread_name_prefix="far-end") as pool:
            future = pool.submit(answer, config, far, gradient, width=self.shape[-1])
            future.add_done_callback(watch)
            try:
                yield near
                future.result()
            finally:
                # A far end that still waits ends with this.
                near.fail(LinkClosed("the measured stage has ended"))


def _copy(stream: str, packet: Packet) -> None:
    """Make every frame of a packet; one copy of all at once would keep the interpreter for milliseconds."""
    body = pack(packet)
    for number, offset in enumerate(range(0, body.num_bytes, MAX_CHUNK_BYTES)):
        end = min(offset + MAX_CHUNK_BYTES, body.num_bytes)
        encode_chunk(
            sequence=number,
            stream=stream,
            packet=0,
            packet_bytes=body.num_bytes,
            offset=offset,
            pieces=body.slice(offset, end),
        )
