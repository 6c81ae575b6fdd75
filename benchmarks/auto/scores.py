"""What the automatic choice came to, beside the best fixed codecs that lose no more."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from emulated import MBPS, LineShape
from predicted.cases import Case

from auto.running import Ran
from auto.trials import AUTO, CROSSING, LEVELS, expected_loss, line_of
from isthmus.plan.codecs import Loss, read_pair
from isthmus.plan.end_of_step import Texts

GOAL: Final = 0.10
# Steps from a change of the line to the codecs that it asks for: three are measured, and both ends must know.
MOST_STEPS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """Steps of a slow-down until codecs changed, then until they were as before, and all changes."""

    there_steps: int
    back_steps: int
    num_changes: int

    @property
    def is_right(self) -> bool:
        """Whether it was followed soon, and left again without going to and fro."""
        return max(self.there_steps, self.back_steps) <= MOST_STEPS and self.num_changes == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One automatic run and its best rival."""

    case: Case
    auto: Ran
    best: Ran

    @property
    def line(self) -> LineShape:
        """Where it ran."""
        return line_of(self.case)

    @property
    def excess(self) -> float:
        """By what share its steps are longer than those of the best fixed codecs."""
        return self.auto.steady_s / self.best.steady_s - 1

    @property
    def is_right(self) -> bool:
        """Whether it is within the goal, and loses no more than its line asks for."""
        return self.excess <= GOAL and loss_of(self.auto.last) <= expected_loss(self.case, self.auto.trial)

    @property
    def is_wide_milder(self) -> bool:
        """Whether the direction that carries more stands on a milder rung; even lines have none such."""
        down, up = _rungs(self.auto.last)
        if self.line.down_bps == self.line.up_bps:
            return True
        return down < up if self.line.down_bps > self.line.up_bps else up < down

    @property
    def following(self) -> "Following | None":
        """How a slow-down was followed, if there was one."""
        return _following(self.auto) if self.auto.trial.slow_down is not None else None

    def record(self) -> dict[str, Any]:
        """All that is known of it."""
        return {
            **_mbps(self.case),
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
            "following": None if self.following is None else asdict(self.following),
        }


def rows_of(cases: Sequence[Case], runs: Sequence[Ran]) -> list[Row]:
    """Every automatic run beside the fastest fixed one on its line that loses no more than it ended with."""
    by_number = {case.number: case for case in cases}
    return [
        Row(case=by_number[one.number], auto=one, best=_best_rival(one, runs))
        for one in runs
        if one.trial.rung is None
    ]


def loss_of(texts: Texts) -> Loss:
    """What codecs of the ladder may cost, the worse of both directions."""
    return max(LEVELS[index].loss for index in _rungs(texts))


def is_monotone(rows: Sequence[Row]) -> bool:
    """Whether a narrower line never has more bytes in either direction, where the job is right about it."""
    even = (one for one in rows if one.auto.trial == AUTO and one.line.down_bps == one.line.up_bps)
    ordered = sorted(even, key=lambda one: -one.line.down_bps)
    return all(
        wide >= narrow
        for before, behind in pairwise(ordered)
        for wide, narrow in zip(_weights(before.auto.last), _weights(behind.auto.last), strict=True)
    )


def fixed_record(case: Case, ran: Ran) -> dict[str, Any]:
    """A run with fixed codecs."""
    return {
        **_mbps(case),
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


def _following(auto: Ran) -> Following:
    """A slow-down that is not followed counts as one that is with the last step."""
    slow_down, codecs = auto.trial.slow_down, auto.codecs[:-1]
    if slow_down is None:
        raise ValueError(f"nothing was slowed down in {auto.trial.name}")
    before = codecs[slow_down.first_step - 1]
    steps = range(len(codecs))
    changed = next((one for one in steps[slow_down.first_step :] if codecs[one] != before), len(codecs))
    others = [one for one in steps[slow_down.end_step :] if codecs[one] != before]
    return Following(
        there_steps=changed - slow_down.first_step,
        back_steps=others[-1] + 1 - slow_down.end_step if others else 0,
        num_changes=sum(one != other for one, other in pairwise(codecs)),
    )


def _mbps(case: Case) -> dict[str, float]:
    line = line_of(case)
    return {"down_mbps": line.down_bps / MBPS, "up_mbps": line.up_bps / MBPS}


def _rungs(texts: Texts) -> tuple[int, int]:
    """Where the codec of each direction stands on the ladder."""
    pair = read_pair(texts)
    return (
        next(index for index, rung in enumerate(LEVELS) if rung.forward == pair.forward),
        next(index for index, rung in enumerate(LEVELS) if rung.backward == pair.backward),
    )


def _weights(texts: Texts) -> tuple[int, int]:
    pair = read_pair(texts)
    return pair.forward_bytes(CROSSING), pair.backward_bytes(CROSSING)
