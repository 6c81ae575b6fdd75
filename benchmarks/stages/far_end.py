"""A stage behind the measured one that takes no time: takes activations, gives gradients made beforehand."""

import queue
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from isthmus.codec.base import Key, flat_bytes
from isthmus.codec.ends import Codecs, receiving_end, sending_end
from isthmus.events import Span
from isthmus.job.codec import gradient_codec
from isthmus.plan.ladder import Pair
from isthmus.plan.types import Pass, Send
from isthmus.train.crossing.coded import Coded
from isthmus.train.crossing.messages import BACKWARD, FORWARD, pack_gradient, read_address
from isthmus.train.crossing.words import TALLY, Tally, pack_tally
from isthmus.wan.counters import LinkCounters
from isthmus.wan.frames import MAX_CHUNK_BYTES, encode_chunk
from isthmus.wan.packet import Packet, pack

NAME = "beyond"


class FarEnd:
    """A link as couriers see it; what is sent is copied chunk by chunk, as links do, and answered at once."""

    def __init__(
        self, gradient: Coded, *, num_microbatches: int, on_span: Callable[[Span], None] = lambda _: None
    ) -> None:
        self.peer = SimpleNamespace(cloud=NAME, rank=0)
        self._gradient = gradient
        self._num_microbatches = num_microbatches
        self._on_span = on_span
        self._inbox: queue.SimpleQueue[tuple[str, Packet]] = queue.SimpleQueue()

    def send(self, stream: str, packet: Packet, **_priority: Any) -> None:
        """Take a packet, and put what it calls for into the inbox."""
        started_s = time.time()
        _copy(stream, packet)
        if stream != FORWARD:
            return
        arrived = read_address(packet, FORWARD)
        step, microbatch = arrived.step, arrived.microbatch
        name = f"send {step}.{microbatch}"
        self._on_span(Span(track="send", name=name, kind="transfer", start_s=started_s, end_s=time.time()))
        about = Send(kind=Pass.BACKWARD, step=step, microbatch=microbatch)
        self._inbox.put((BACKWARD, pack_gradient(self._gradient, about=about, sent_s=time.time())))
        if microbatch == self._num_microbatches - 1:
            self._inbox.put((TALLY, pack_tally(_tally(step))))

    def receive_any(self, _streams: Sequence[str], *, timeout_s: float | None = None) -> tuple[str, Packet]:
        """The next packet for the measured stage."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None

    def counters(self) -> LinkCounters:
        """A link without a way."""
        return LinkCounters(
            sent={},
            received={},
            rtt_s=0.0,
            clock_offset_s=0.0,
            reconnects=0,
            queued_bytes=0,
            in_flight_bytes=0,
        )


def coded_gradient(
    pair: Pair, *, num_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Coded:
    """A gradient on the host, as the far end would have coded it."""
    generator = torch.Generator().manual_seed(1)
    rows_ND = (1e-4 * torch.randn(num_rows, width, generator=generator)).to(device, dtype)
    backward = gradient_codec(pair.forward, pair.backward)
    if backward.is_raw:
        parts: tuple[torch.Tensor, ...] = (flat_bytes(rows_ND),)
    else:
        codecs = Codecs(forward=pair.forward, backward=pair.backward, width=width)
        sending, receiving = sending_end(codecs, device=device), receiving_end(codecs, device=device)
        key = Key(step=0, microbatch=0)
        receiving.decode(sending.encode(rows_ND, key=key), key=key, num_rows=num_rows)
        parts = receiving.encode_gradient(rows_ND, key=key)
    on_host = tuple(part.cpu() for part in parts)
    return Coded(codec=str(backward), dtype=dtype, num_rows=num_rows, parts=on_host)


def _tally(step: int) -> Tally:
    return Tally(step=step, loss_sum=0.0, squared_norms=(), busy_s=(0.0,), hops=(), travel_s=0.0)


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
