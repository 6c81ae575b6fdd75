"""Where one end of a cut codes: rows on the device to bytes on the host and back, beside the computation."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from isthmus.codec.base import Key, Payload, flat_bytes
from isthmus.codec.meter import Fidelity
from isthmus.errors import FrameError
from isthmus.events import Span
from isthmus.job.codec import CodecSpec
from isthmus.plan.types import Arrived, Send
from isthmus.train.crossing.coded import Coded, raw_rows
from isthmus.train.crossing.cut import RAW
from isthmus.train.device import Lane
from isthmus.wan.frames import wire_bytes
from isthmus.wan.packet import Packet, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """How many numbers of hidden states have left for other stages, projected or not, and in what bytes."""

    num_elements: int = 0
    num_bytes: int = 0
    """On the line, all told."""

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            num_elements=self.num_elements + other.num_elements, num_bytes=self.num_bytes + other.num_bytes
        )

    def __sub__(self, other: "Volume") -> "Volume":
        return Volume(
            num_elements=self.num_elements - other.num_elements, num_bytes=self.num_bytes - other.num_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What coding has changed of one message, as its sender found."""

    track: str
    """Where it went, such as east→west."""
    step: int
    microbatch: int
    relative_error: float
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What has been done so far, and how often."""

    total_s: float = 0.0
    count: int = 0

    def more(self, duration_s: float) -> "Effort":
        """The same with one time more."""
        return Effort(total_s=self.total_s + duration_s, count=self.count + 1)

    def mean_s(self, *, since: "Effort") -> float:
        """Of all times since then."""
        return (self.total_s - since.total_s) / max(1, self.count - since.count)


@dataclass(slots=True, kw_only=True)
class Bench:
    """The lane of one end of a cut, what has left by it, and who hears what coding takes and changes."""

    lane: Lane
    leaves: str
    """The track of what leaves, such as east→west."""
    arrives: str
    hidden_width: int
    on_span: Callable[[Span], None]
    on_measured: Callable[[Measured], None]
    element_bytes: int = 0
    """Of a number that leaves, before it is coded; 0 where none has left yet."""
    volume: Volume = field(default_factory=Volume)
    # Each is added to by one thread of the courier.
    encoding: Effort = field(default_factory=Effort)
    decoding: Effort = field(default_factory=Effort)
    _told: tuple[Effort, Effort] = (Effort(), Effort())

    def take_coding_s(self) -> float:
        """What it took, on average since this was last asked, to encode a message and to decode another."""
        before, self._told = self._told, (self.encoding, self.decoding)
        return sum(now.mean_s(since=then) for now, then in zip(self._told, before, strict=True))

    def code(self, rows_ND: Tensor, codec: CodecSpec, encode: Callable[[Tensor], Payload]) -> Coded:
        """Rows on the device as bytes on the host, which are there when the lane's work is done."""
        self.element_bytes = rows_ND.dtype.itemsize
        parts = (flat_bytes(rows_ND),) if codec.is_raw else encode(rows_ND)
        return Coded(
            codec=str(codec),
            dtype=rows_ND.dtype,
            num_rows=len(rows_ND),
            parts=tuple(map(self.lane.to_host, parts)),
        )

    def rows(
        self,
        coded: Coded,
        codec: CodecSpec,
        decode: Callable[[Payload], Tensor],
        *,
        num_rows: int,
        width: int,
    ) -> Tensor:
        """Rows on the device from bytes on the host, of the type that they had."""
        if coded.codec != str(codec):
            raise FrameError(f'what crossed is coded by "{coded.codec}", where "{codec}" is due')
        if coded.num_rows != num_rows:
            raise FrameError(f"{coded.num_rows} rows have crossed, where {num_rows} are due")
        if codec.is_raw:
            return self.lane.to_device(raw_rows(coded, width=width))
        return decode(tuple(map(self.lane.to_device, coded.parts))).to(coded.dtype)

    def weigh(self, packet: Packet, *, num_rows: int) -> None:
        """Count the bytes that a packet takes on the line, with all that goes around it."""
        num_bytes = wire_bytes(pack(packet).num_bytes)
        self.volume += Volume(num_elements=num_rows * self.hidden_width, num_bytes=num_bytes)

    def note_encoded(self, coded: Coded, about: Send, started_s: float) -> None:
        """Tell how long coding took, unless the rows crossed as they are."""
        self.encoding = self.encoding.more(time.time() - started_s)
        self._note("encode", self.leaves, coded, about, started_s)

    def note_decoded(self, coded: Coded, about: Arrived, started_s: float) -> None:
        """Tell how long decoding took, unless the rows crossed as they are."""
        self.decoding = self.decoding.more(time.time() - started_s)
        self._note("decode", self.arrives, coded, about, started_s)

    def note_measured(self, key: Key, found: Fidelity) -> None:
        """Tell how far what arrives is from what was sent."""
        self.on_measured(
            Measured(
                track=self.leaves,
                step=key.step,
                microbatch=key.microbatch,
                relative_error=found.relative_error,
                cosine=found.cosine,
            )
        )

    def _note(self, kind: str, track: str, coded: Coded, about: Send | Arrived, started_s: float) -> None:
        if coded.codec != str(RAW):
            name = f"{about.kind.value} {about.step}.{about.microbatch}"
            self.on_span(
                Span(
                    track=track,
                    name=name,
                    kind=kind,
                    start_s=started_s,
                    end_s=time.time(),
                    num_bytes=coded.num_bytes,
                )
            )
