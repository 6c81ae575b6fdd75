"""Faults of an emulated link, as they happen to it."""

from typing import Protocol

from isthmus.plan.faults import Fault, FaultKind
from isthmus.wan.relays.shaping import Direction


class Disturbed(Protocol):
    """A link that can be disturbed at any time."""

    def cut(self, duration_s: float) -> None:
        """Reset every connection now, and every new one until the time is over."""

    def blackhole(self, duration_s: float) -> None:
        """Let nothing pass: connections stay, new ones hang, and all goes on when the time is over."""

    def slow_down(self, factor: float, duration_s: float) -> None:
        """Divide the bandwidth of both directions by `factor` for this long."""

    def corrupt(self, direction: Direction, num_bytes: int = 1) -> None:
        """Flip bytes of the next bulk data that goes this way."""


def inject(fault: Fault, link: Disturbed, *, dialer: str) -> None:
    """Let a fault happen now on a link that the cloud `dialer` dials."""
    match fault.kind:
        case FaultKind.CUT:
            link.cut(fault.duration_s)
        case FaultKind.BLACKHOLE:
            link.blackhole(fault.duration_s)
        case FaultKind.SLOW_DOWN:
            link.slow_down(fault.factor, fault.duration_s)
        case FaultKind.CORRUPT:
            sender = fault.sender or fault.between[0]
            link.corrupt(Direction.UP if sender == dialer else Direction.DOWN, fault.num_bytes)
