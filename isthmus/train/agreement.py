"""How clouds that have just met agree on a run: which one, on what model, and from which step.

The first cloud tells the others what it runs. The steps that every cloud has saved travel back up, and the
newest of them goes down again. The end is agreed on likewise.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from isthmus.errors import FrameError
from isthmus.wan.link import Link
from isthmus.wan.packet import Packet

_OFFER: Final = "start/offer"
_SAVED: Final = "start/saved"
_START: Final = "start/step"
_ENDED: Final = "end/here"
_ALL_ENDED: Final = "end/all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What only the first cloud knows; its clock is the run's."""

    run_id: str
    config: Mapping[str, Any]
    num_labels: int | None
    num_validation_microbatches: int
    decisions: Mapping[str, Any] | None = None
    """Of its plan; each site may have measured other figures, so only one of them plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the run begins; `clock_offset_s` added to the clock here gives the first cloud's."""

    step: int
    clock_offset_s: float


def pass_offer_on(offer: Offer | None, *, up: Link | None, down: Link | None) -> Offer:
    """Give the offer of the first cloud, where it is made, or as it comes, and pass it on."""
    if up is not None:
        header = up.receive(_OFFER).header
        try:
            offer = Offer(**header)  # type: ignore[arg-type]
        except TypeError as error:
            raise FrameError(f"an offer that cannot be read: {error}") from error
    if offer is None:
        raise ValueError("the first cloud makes the offer")
    if down is not None:
        down.send(_OFFER, Packet(asdict(offer)))
    return offer


def agree_on_step(saved: set[int], *, up: Link | None, down: Link | None) -> Start:
    """The newest step that all clouds have saved, 0 if there is none."""
    if down is not None:
        saved &= _read_steps(down.receive(_SAVED))
    if up is None:
        start = Start(step=max(saved, default=0), clock_offset_s=0.0)
    else:
        up.send(_SAVED, Packet({"steps": sorted(saved)}))
        start = _read_start(up.receive(_START), up.counters().clock_offset_s or 0.0)
    if down is not None:
        down.send(_START, Packet(asdict(start)))
    return start


def agree_on_end(*, up: Link | None, down: Link | None) -> None:
    """Wait until every cloud has come to the end: none closes a link that another still listens to."""
    if down is not None:
        down.receive(_ENDED)
    if up is not None:
        up.send(_ENDED, Packet({}))
        up.receive(_ALL_ENDED)
    if down is not None:
        down.send(_ALL_ENDED, Packet({}))


def _read_steps(packet: Packet) -> set[int]:
    steps = packet.header.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
        raise FrameError("a list of saved steps that is none")
    return set(steps)


def _read_start(packet: Packet, offset_s: float) -> Start:
    step, before_s = packet.header.get("step"), packet.header.get("clock_offset_s")
    if not isinstance(step, int) or not isinstance(before_s, float):
        raise FrameError("a start without a step")
    return Start(step=step, clock_offset_s=before_s + offset_s)
