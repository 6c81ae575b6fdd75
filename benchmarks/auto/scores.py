"""What the automatic choice came to, beside the best fixed codecs that lose no more."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from predicted.cases import MBPS, Case

from auto.running import Ran
from auto.trials import AUTO, CROSSING, RUNGS, bandwidth_bps, expected_loss
from isthmus.plan.ladder import Loss, Pair
from isthmus.train.cut import read_pair

GOAL: Final = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One automatic run and its best rival."""

    case: Case
    auto: Ran
    best: Ran

    @property
    def mbps(self) -> float:
        """What the line carries."""
        return bandwidth_bps(self.case) / MBPS

    @property
    def excess(self) -> float:
        """By what share its steps are longer than those of the best fixed codecs."""
        return self.auto.steady_s / self.best.steady_s - 1

    @property
    def is_right(self) -> bool:
        """Whether it is within the goal, and loses no more than its line asks for."""
        return self.excess <= GOAL and loss_of(self.auto.last) <= expected_loss(self.case, self.auto.trial)

    def record(self) -> dict[str, Any]:
        """All that is known of it."""
        return {
            "mbps": self.mbps,
            "trial": self.auto.trial.name,
            "planned": self.auto.first,
            "settled": self.auto.last,
            "since_step": self.auto.since_step,
            "loss": loss_of(self.auto.last).name.lower(),
            "steady_s": self.auto.steady_s,
            "best_fixed": self.best.last,
            "best_fixed_s": self.best.steady_s,
            "excess": self.excess,
            "is_right": self.is_right,
            "steps_s": self.auto.steps_s,
            "reasons": self.auto.reasons,
        }


def rows_of(cases: Sequence[Case], runs: Sequence[Ran]) -> list[Row]:
    """Every automatic run beside the fastest fixed one on its line that loses no more than it ended with."""
    by_number = {case.number: case for case in cases}
    return [
        Row(case=by_number[one.number], auto=one, best=_best_rival(one, runs))
        for one in runs
        if one.trial.rung is None
    ]


def loss_of(texts: tuple[str, str]) -> Loss:
    """What codecs of the ladder may cost, the worse of both directions."""
    pair = read_pair(list(texts))
    return max(
        next(rung.loss for rung in RUNGS if rung.forward == pair.forward),
        next(rung.loss for rung in RUNGS if rung.backward == pair.backward),
    )


def is_monotone(rows: Sequence[Row]) -> bool:
    """Whether a narrower line never has more bytes in either direction, where the job is right about it."""
    ordered = sorted((one for one in rows if one.auto.trial == AUTO), key=lambda one: -one.mbps)
    return all(
        wide >= narrow
        for before, behind in pairwise(ordered)
        for wide, narrow in zip(_weights(before.auto.last), _weights(behind.auto.last), strict=True)
    )


def fixed_record(case: Case, ran: Ran) -> dict[str, Any]:
    """A run with fixed codecs."""
    return {
        "mbps": bandwidth_bps(case) / MBPS,
        "codecs": ran.first,
        "settled": ran.last,
        "steady_s": ran.steady_s,
        "steps_s": ran.steps_s,
    }


def _best_rival(auto: Ran, runs: Sequence[Ran]) -> Ran:
    rivals = [
        one
        for one in runs
        if one.number == auto.number
        and one.trial.rung is not None
        and one.trial.rung.loss <= loss_of(auto.last)
    ]
    return min(rivals, key=lambda one: one.steady_s)


def _weights(texts: tuple[str, str]) -> tuple[int, int]:
    pair: Pair = read_pair(list(texts))
    return pair.forward_bytes(CROSSING), pair.backward_bytes(CROSSING)
