"""Who wants to know what happens in a stage, and what it is told."""

from dataclasses import dataclass, field
from typing import Protocol

from isthmus.events import Span
from isthmus.train.crossing.bench import Measured, Volume
from isthmus.train.crossing.cut import SavedCuts
from isthmus.train.crossing.words import Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """What a stage knows at the end of a step; the loss, per target, is known to the first stage alone."""

    step: int
    loss: float
    norm: float
    learning_rate: float
    num_tokens: int
    duration_s: float
    busy_s: tuple[float, ...]
    windows: tuple[int, ...]
    save: bool
    cuts: SavedCuts | None = None
    """Where it is time to save: the codes of the next step."""
    sent: Volume = field(default_factory=Volume)
    """What has crossed from this stage since the step before."""


class Observer(Protocol):
    """Who wants to know."""

    def span(self, span: Span) -> None:
        """Something took its time; times are of this cloud's clock."""

    def measured(self, found: Measured) -> None:
        """The sender of a message has found what coding changed of it."""

    def step_ended(self, ended: StepEnded) -> None:
        """The weights are updated."""

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation has come to the first stage."""
