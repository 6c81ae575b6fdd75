"""How near predictions came: errors, and whether they put cases in the right order."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from predicted.cases import Case
from predicted.predicting import Prediction
from predicted.running import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One case, predicted and measured."""

    case: Case
    prediction: Prediction
    measured: Measured

    @property
    def predicted_s(self) -> float:
        """A step as it was predicted."""
        return self.prediction.step_s

    @property
    def measured_s(self) -> float:
        """The step in the middle of those that were measured."""
        return self.measured.median.duration_s

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured; negative where it took longer."""
        return self.predicted_s / self.measured_s - 1

    def record(self) -> dict[str, Any]:
        """All that is known of it."""
        return {
            **asdict(self.case),
            "predicted_s": self.predicted_s,
            "predicted_windows": self.prediction.windows,
            "measured_s": self.measured_s,
            "error": self.error,
            "idle_share": self.measured.idle_share,
            "steps": [asdict(step) for step in self.measured.steps],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Over several cases."""

    num_cases: int
    bias: float
    mean_error: float
    worst_error: float
    kendall_tau: float | None


def score(outcomes: Sequence[Outcome]) -> Score:
    """The mean, the mean and the largest of the absolute errors, and the order."""
    errors = [one.error for one in outcomes]
    return Score(
        num_cases=len(outcomes),
        bias=statistics.fmean(errors),
        mean_error=statistics.fmean(map(abs, errors)),
        worst_error=max(map(abs, errors)),
        kendall_tau=kendall_tau([(one.predicted_s, one.measured_s) for one in outcomes]),
    )


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, Score]:
    """A score for each kind of case."""
    kinds: defaultdict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        for kind in one.case.kinds:
            kinds[kind].append(one)
    return {kind: score(kinds[kind]) for kind in sorted(kinds)}


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's τ-b: (C − D) / √((C + D + Tx)(C + D + Ty)) over all pairs of points.

    C agree on the order, D do not, Tx and Ty are tied in one alone. None where there is no order.
    """
    signs = [(_sign(x1 - x2), _sign(y1 - y2)) for (x1, y1), (x2, y2) in combinations(pairs, 2)]
    agreement = sum(x * y for x, y in signs)
    ordered = sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs)
    return agreement / math.sqrt(ordered) if ordered else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
