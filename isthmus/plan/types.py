"""What drives a strategy and what it asks for: events in, actions out.

A scheduler is a pure state machine that never sees a tensor, a link or a clock. Whoever drives it does what
the actions say and reports what happens: the simulator on a virtual clock, the worker on the real one. A
driver carries out `Run`, `Optimize` and `Report` as it gets them, one at a time, hands each `Send` to the
link without waiting for it, and reports `Done` once for each of the four.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from isthmus.errors import IsthmusError


class ScheduleError(IsthmusError):
    """An event that cannot be: a driver, or a peer, does not keep to the schedule."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="run the same version of Isthmus and the same job on every cloud")


class Pass(enum.Enum):
    """A way of a micro-batch through a stage; evaluation is a forward that keeps nothing for a backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A step, or the evaluation of the weights that it starts from, may begin with these micro-batches.

    A rank that shares its stage with others is started with the micro-batches that are routed to it.
    """

    step: int
    microbatches: tuple[int, ...]
    evaluation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What a pass needs has come: an activation from the stage before, or a gradient from the one behind."""

    kind: Pass
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """This many micro-batches may now be in flight."""

    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A peer is gone for good."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Compute one pass of one micro-batch."""

    kind: Pass
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Pass on what a run gave, an activation or a gradient; done when the link has taken it over."""

    kind: Pass
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimize:
    """Update the weights with the gradients of this step, if any, which ends it."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """End the evaluation of this step; the last stage has its loss."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Give up: without this peer the strategy cannot go on."""

    peer: str


Action = Run | Send | Optimize | Report | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An action has been carried out."""

    action: Action


Event = Started | Arrived | Done | Resized | Lost


class Scheduler(Protocol):
    """The decisions of one strategy at one place."""

    def on(self, event: Event) -> tuple[Action, ...]:
        """Take in what happened and say what to do now, in this order."""
