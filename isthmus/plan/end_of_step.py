"""The end of a pipeline's step: what each stage measured is joined on its way up, and the first judges it.

When a stage has run its last backward, its leader sends a tally up: the norms of its own gradients and of all
behind it, beside its last gradient. The first stage has them all when its own last backward ends, and sends
its verdict down at once. The verdict overtakes the next step's first activation, without which no later stage
could continue anyway, so every stage knows the norm before it updates its weights and none has waited for it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from isthmus.plan.saving import Saving, slowest
from isthmus.plan.scenario import Hop
from isthmus.plan.types import Carried, Count, Facts, Seconds

_NAN: Final = math.nan
# An exact sum of numbers of any size has at most 40 parts.
_MAX_PARTS: Final = 64
_MAX_STAGES: Final = 1024
_MAX_COSINE: Final = 1.001


def _check_cosine(value: float) -> float:
    if not (math.isnan(value) or abs(value) <= _MAX_COSINE):
        raise ValueError("a cosine is between -1 and 1")
    return value


# Bounds of what a peer may say.
Window = Annotated[int, Field(ge=1, le=2**24)]
ElementBytes = Annotated[int, Field(ge=0, le=64)]
Norm = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Cosine = Annotated[float, AfterValidator(_check_cosine)]
"""NaN where it was not measured."""
Codec = Annotated[str, Field(max_length=256)]
Texts = tuple[Codec, Codec]
"""The codec of activations and that of gradients, as text."""
_PER_STAGE: Final = Field(min_length=1, max_length=_MAX_STAGES, fail_fast=True)
_PER_CUT: Final = Field(max_length=_MAX_STAGES - 1, fail_fast=True)
_Name = Annotated[str, Field(max_length=32)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
Metrics = Annotated[tuple[tuple[_Name, _Finite], ...], Field(max_length=8)]
"""What a task is judged by beside its loss: names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Facts):
    """The targets and tokens that all members of the first stage have read for a step."""

    num_targets: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Facts):
    """What one member's wires measured in a step; None and NaN where nothing was."""

    forward_travel_s: float | None = None
    """The shortest travel of an activation to this member."""
    backward_travel_s: float | None = None
    rtt_s: float = 0.0
    """The round trip to the stage behind."""
    up_coding_s: float = 0.0
    """Coding of an activation that arrived and of its gradient that left, at this end."""
    down_coding_s: float = 0.0
    element_bytes: int = 0
    """The size of an element that left for the stage behind, before it was coded."""
    forward_cosine: float = _NAN
    """The lowest cosine of what left for the stage behind."""
    backward_cosine: float = _NAN
    busy_s: float = 0.0
    wants_stop: bool = False
    saving: Saving = field(default_factory=Saving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced(Facts):
    """What REDUCE found at one member: what was seen, and what was read from the device."""

    seen: Seen
    loss_sum: float
    squared_norms: tuple[float, ...]
    num_targets: int = 0
    """Those that the loss is a sum over; 0 where it is taken elsewhere."""
    busy_s: float = 0.0
    """Device time of passes that had not been reported yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosines(Facts):
    """The lowest cosine of what crossed a cut, each way; NaN where none was measured."""

    forward: Cosine = _NAN
    backward: Cosine = _NAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally(Facts):
    """What a step gave in this stage and all behind it; times are per stage from this one on."""

    step: Count
    loss_sum: float
    squared_norms: Annotated[tuple[float, ...], Field(max_length=_MAX_PARTS)]
    busy_s: Annotated[tuple[Seconds, ...], _PER_STAGE]
    """The mean over the ranks of each stage."""
    hops: Annotated[tuple[Hop, ...], _PER_CUT] = ()
    travel_s: Seconds = 0.0
    coding_s: Seconds = 0.0
    cosines: Annotated[tuple[Cosines, ...], _PER_CUT] = ()
    element_bytes: Annotated[tuple[ElementBytes, ...], _PER_CUT] = ()
    gradient_cosine: Cosine = _NAN
    num_targets: Count = 0
    wants_stop: bool = False
    saving: Saving = field(default_factory=Saving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Facts):
    """What the first stage concludes from the tallies of all."""

    step: Count
    norm: Norm
    windows: Annotated[tuple[Window, ...], _PER_STAGE]
    save: bool = False
    safe_step: Count = 0
    """The newest step that all clouds have saved."""
    stop: bool = False
    codecs: Annotated[tuple[Texts, ...], _PER_CUT] = ()
    """The codecs of all cuts from the next step on; empty where nothing is coded."""
    loss: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """The mean over the targets of the step; for people at all sites."""
    num_tokens: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated(Facts):
    """The end of UPDATE; the leader's verdict reaches all members of its group."""

    verdict: Verdict | None
    learning_rate: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Facts):
    """One round of an evaluation at one member: the loss of each micro-batch, and what was correct."""

    losses: tuple[float, ...]
    num_correct: int
    num_targets: int
    counts: tuple[int, ...] = ()
    """What metrics follow from; those of several members are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(Facts):
    """What SCORE found at one member of the last stage, round by round."""

    rounds: tuple[Round, ...]
    metrics: tuple[Metrics, ...] = ()
    """Of all members, at their leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Facts):
    """The evaluation of the weights that a step starts from; `is_plain` if everything crossed raw for it."""

    step: Count
    loss_sum: float
    num_correct: Count
    num_targets: Count
    is_plain: bool = False
    metrics: Metrics = ()

    @property
    def loss(self) -> float:
        """The mean loss of a target."""
        return self.loss_sum / max(self.num_targets, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best(Facts):
    """The step whose weights were the best in an evaluation, by one metric."""

    metric: _Name
    step: Count
    value: _Finite

    @classmethod
    def of(cls, found: Evaluated, metric: str) -> "Best | None":
        """What an evaluation says of its weights; None where the metric is not known."""
        value = found.loss if metric == "loss" else dict(found.metrics).get(metric, math.nan)
        return cls(metric=metric, step=found.step, value=value) if math.isfinite(value) else None

    def beats(self, other: "Best | None") -> bool:
        """Whether this is better than the best before it, or that was chosen by another metric."""
        if other is None or other.metric != self.metric:
            return True
        return self.value < other.value if self.metric == "loss" else self.value > other.value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(Facts):
    """What a member knows at the end of a step; loss and tokens come with the verdict."""

    step: int
    loss: float
    norm: float
    learning_rate: float
    num_tokens: int
    duration_s: float
    busy_s: tuple[float, ...]
    windows: tuple[int, ...]
    num_elements: int = 0
    """Elements of hidden states that this member has sent since the step before, and the bytes they took."""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Facts):
    """Something to tell the user in words."""

    text: str


@dataclass(slots=True)
class StepMeter:
    """Collects what one member's wires report in the course of a step, by whether it is of gradients."""

    busy_s: float = 0.0
    num_elements: int = 0
    num_bytes: int = 0
    _sent: dict[bool, list[Carried]] = field(default_factory=lambda: {False: [], True: []})
    _arrived: dict[bool, list[Carried]] = field(default_factory=lambda: {False: [], True: []})
    _travel_s: dict[bool, float] = field(default_factory=dict)
    """The shortest."""

    def sent(self, found: Carried, *, is_gradient: bool) -> None:
        """Take in an activation that left for the stage behind, or a gradient for the stage before."""
        self._sent[is_gradient].append(found)
        self.num_elements += found.num_elements
        self.num_bytes += found.num_bytes

    def arrived(self, found: Carried, travel_s: float, *, is_gradient: bool) -> None:
        """Take in an activation from the stage before, or a gradient from the stage behind."""
        self._arrived[is_gradient].append(found)
        self._travel_s[is_gradient] = min(travel_s, self._travel_s.get(is_gradient, math.inf))

    def seen(self, *, wants_stop: bool, saving: Saving) -> Seen:
        """What was collected, as facts."""
        behind, before = self._sent[False], self._sent[True]
        return Seen(
            forward_travel_s=self._travel_s.get(False),
            backward_travel_s=self._travel_s.get(True),
            rtt_s=behind[-1].rtt_s if behind else 0.0,
            up_coding_s=_mean_coding_s(self._arrived[False]) + _mean_coding_s(before),
            down_coding_s=_mean_coding_s(behind) + _mean_coding_s(self._arrived[True]),
            element_bytes=next((one.element_bytes for one in reversed(behind) if one.element_bytes), 0),
            forward_cosine=_lowest(one.cosine for one in behind),
            backward_cosine=_lowest(one.cosine for one in before),
            busy_s=self.busy_s,
            wants_stop=wants_stop,
            saving=saving,
        )


def _mean_coding_s(found: Sequence[Carried]) -> float:
    return sum(one.coding_s for one in found) / max(len(found), 1)


def stage_tally(step: int, members: Sequence[Reduced]) -> Tally:
    """The tally of one stage: losses add up, ranks work side by side, the shortest and the worst counts."""
    seen = [one.seen for one in members]
    return Tally(
        step=step,
        loss_sum=math.fsum(one.loss_sum for one in members),
        squared_norms=condensed(members[0].squared_norms),
        busy_s=(math.fsum(one.seen.busy_s + one.busy_s for one in members) / len(members),),
        travel_s=_shortest(one.forward_travel_s for one in seen) or 0.0,
        coding_s=max(one.up_coding_s for one in seen),
        gradient_cosine=_lowest(one.backward_cosine for one in seen),
        num_targets=sum(one.num_targets for one in members),
        wants_stop=any(one.wants_stop for one in seen),
        saving=slowest(one.saving for one in seen),
    )


def joined(own: Tally, members: Sequence[Reduced], behind: Tally) -> Tally:
    """The tally of a stage and of all behind it."""
    if behind.step != own.step:
        raise ValueError(f"a tally of step {behind.step} at the end of step {own.step}")
    seen = [one.seen for one in members]
    back_s = _shortest(one.backward_travel_s for one in seen)
    coding_s = max(one.down_coding_s for one in seen) + behind.coding_s
    hop = _hop(behind.travel_s, back_s, max(one.rtt_s for one in seen), coding_s)
    here = Cosines(forward=_lowest(one.forward_cosine for one in seen), backward=behind.gradient_cosine)
    return replace(
        own,
        loss_sum=behind.loss_sum,
        num_targets=behind.num_targets,
        squared_norms=condensed(own.squared_norms + behind.squared_norms),
        busy_s=own.busy_s + behind.busy_s,
        hops=(hop, *behind.hops),
        cosines=(here, *behind.cosines),
        element_bytes=(max(one.element_bytes for one in seen), *behind.element_bytes),
        wants_stop=own.wants_stop or behind.wants_stop,
        saving=slowest((own.saving, behind.saving)),
    )


def evaluations(step: int, members: Sequence[Scored]) -> list[Evaluated]:
    """The result of each round of an evaluation at the last stage; the second is without codecs."""
    found = []
    for number, rounds in enumerate(zip(*(one.rounds for one in members), strict=True)):
        found.append(
            Evaluated(
                step=step,
                loss_sum=math.fsum(loss for one in rounds for loss in one.losses),
                num_correct=sum(one.num_correct for one in rounds),
                num_targets=sum(one.num_targets for one in rounds),
                is_plain=number > 0,
                metrics=members[0].metrics[number] if members[0].metrics else (),
            )
        )
    return found


def condensed(values: Sequence[float]) -> tuple[float, ...]:
    """A few numbers whose exact sum is that of the values, so that no bit depends on how stages are cut."""
    parts: list[float] = []
    while left := _exact_sum((*values, *(-part for part in parts))):
        if math.isnan(left):
            return (_NAN,)
        parts.append(left)
    return tuple(parts)


def total_norm(squared_norms: Sequence[float]) -> float:
    """The norm over all parameters, summed exactly; NaN where there is none."""
    total = _exact_sum(squared_norms)
    return math.sqrt(total) if total >= 0 else _NAN


def _exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once; NaN where it is not finite."""
    try:
        return math.fsum(values) if all(map(math.isfinite, values)) else _NAN
    except OverflowError:
        return _NAN


def _hop(forward_s: float, backward_s: float | None, rtt_s: float, coding_s: float) -> Hop:
    """Travel less latency is time on the line; errors of the clocks cancel in the round trip."""
    latency_s = rtt_s / 2
    # To frozen layers nothing comes back.
    travel_s = forward_s if backward_s is None else (forward_s + backward_s) / 2
    on_line_s = max(0.0, travel_s - latency_s)
    return Hop(forward_s=on_line_s, backward_s=on_line_s, latency_s=latency_s, coding_s=coding_s)


def _shortest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _lowest(values: Iterable[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=_NAN)
