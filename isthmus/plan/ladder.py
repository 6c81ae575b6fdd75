"""Which codec a link gets: compress only what computation does not hide already.

A ladder leads from the mildest codec to the strongest. Per link and direction the mildest one is taken that
is as fast as any that is allowed: where the link is hidden that is `raw`. The planner asks with planned
figures, the workers with measured ones; the same figures give the same answer everywhere.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from isthmus.job.codec import CodecSpec, gradient_codec, gradient_wire_bytes, parse_codec
from isthmus.job.codec_steps import SameBasis, SameIndices, Subspace
from isthmus.job.findings import FieldError
from isthmus.units import format_duration

HEADROOM: Final = 0.9
"""A transfer counts as hidden up to this share of the interval: links are not always at their best."""

# Codecs whose steps take about as long are equals, and the mildest of them is taken.
_TOLERANCE: Final = 0.05
# Figures that move to and fro must not move the codec with them.
_CAUTIOUS_HEADROOM: Final = 0.7
_WORTHWHILE_GAIN: Final = 0.12

_SHARES_OF_WIDTH: Final = (4, 8, 16)
_LEAST_RANK: Final = 8


class Loss(enum.IntEnum):
    """How much quality a codec may cost."""

    NONE = 0
    SLIGHT = 1
    """Less than a few seeds could show."""
    SOME = 2
    """Little, and it can be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A codec for each direction; `is_joint` where they make sense only together."""

    forward: CodecSpec
    backward: CodecSpec
    loss: Loss
    is_joint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What one micro-batch puts across a cut; above frozen layers nothing goes back."""

    num_rows: int
    width: int
    element_bytes: int = 4
    """Of an element that crosses raw."""
    has_gradient: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds of computation per micro-batch at the slowest stage, and what the line carries each way."""

    interval_s: float
    down_bps: float
    up_bps: float

    def __post_init__(self) -> None:
        if self.interval_s < 0 or min(self.down_bps, self.up_bps) <= 0:
            raise ValueError(f"no line has these figures: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a choice must keep to."""

    loss: Loss = Loss.SLIGHT
    forward: CodecSpec | None = None
    """The job's own codec of activations, None where it is free."""
    backward: CodecSpec | None = None
    least_forward_bytes: int = 0
    """Where the guard has found codecs with fewer bytes too strong."""
    least_backward_bytes: int = 0


DEFAULT_BOUNDS: Final = Bounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The codecs of a link."""

    forward: CodecSpec
    backward: CodecSpec

    @property
    def is_possible(self) -> bool:
        """Whether gradients can cross as the backward codec says, behind this forward codec."""
        try:
            gradient_codec(self.forward, self.backward)
        except FieldError:
            return False
        return True

    @property
    def has_subspace(self) -> bool:
        """Whether activations and gradients share a basis, which is learned."""
        return any(isinstance(step, Subspace) for step in self.forward.steps)

    @property
    def projects_gradients(self) -> bool:
        """Whether gradients cross only where their activation did: what stays behind is no error."""
        first = gradient_codec(self.forward, self.backward).steps[0]
        return isinstance(first, SameBasis | SameIndices)

    def forward_bytes(self, crossing: Crossing) -> int:
        """Bytes of an activation on the line."""
        return self.forward.wire_bytes(
            crossing.num_rows, crossing.width, element_bytes=crossing.element_bytes
        )

    def backward_bytes(self, crossing: Crossing) -> int:
        """Bytes of its gradient on the line."""
        if not crossing.has_gradient:
            return 0
        return gradient_wire_bytes(
            self.forward,
            self.backward,
            crossing.num_rows,
            crossing.width,
            element_bytes=crossing.element_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The codecs chosen for a link, the time of a message of each on the line, and why."""

    pair: Pair
    loss: Loss
    forward_s: float
    backward_s: float
    is_hidden: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A pair that is allowed: where it stands on the ladder, and how fast it is."""

    pair: Pair
    loss: Loss
    rungs: tuple[int, int]
    forward_s: float
    backward_s: float

    @property
    def mildness(self) -> tuple[int, int, int]:
        """The smaller the milder; between equals the gradient is spared."""
        return (self.loss, sum(self.rungs), self.rungs[1])

    def step_s(self, figures: Figures, headroom: float) -> float:
        """What a micro-batch takes in the long run: the slowest of computation and both directions."""
        return max(figures.interval_s, self.forward_s / headroom, self.backward_s / headroom)


def ladder(width: int, *, shares_ids: bool = False) -> tuple[Rung, ...]:
    """The codecs for cuts of this width, mildest first; anchors only where token ids may cross."""
    plain = (
        _rung("raw", "raw", Loss.NONE),
        _rung("bf16", "bf16", Loss.SLIGHT),
        _rung("rotate | int8", "rotate | int8(stochastic)", Loss.SLIGHT),
        _rung("center | rotate | int4", "rotate | int4(stochastic)", Loss.SLIGHT),
    )
    anchor = ", anchor=tokens" if shares_ids else ""
    ranks = [rank for share in _SHARES_OF_WIDTH if (rank := width // share) >= _LEAST_RANK]
    joint = (
        _rung(f"subspace({rank}{anchor}) | int4", "int4(stochastic)", Loss.SOME, is_joint=True)
        for rank in ranks
    )
    return (*plain, *joint)


def choose(
    crossing: Crossing,
    figures: Figures,
    *,
    rungs: Sequence[Rung],
    bounds: Bounds = DEFAULT_BOUNDS,
    headroom: float = HEADROOM,
) -> Choice:
    """The mildest codecs with which a step takes no longer than with any others that are allowed."""
    options = _options(crossing, figures, rungs, bounds)
    fastest_s = min(option.step_s(figures, headroom) for option in options)
    as_fast = (one for one in options if one.step_s(figures, headroom) <= fastest_s * (1 + _TOLERANCE))
    return _explain(min(as_fast, key=lambda one: one.mildness), options, crossing, figures, bounds)


def reconsider(
    current: Pair,
    crossing: Crossing,
    figures: Figures,
    *,
    rungs: Sequence[Rung],
    bounds: Bounds = DEFAULT_BOUNDS,
) -> Choice | None:
    """What to change to, None to stay: stronger only for a real gain, milder only with room to spare."""
    options = _options(crossing, figures, rungs, bounds)
    own = next((one for one in options if one.pair == current), None)
    best = choose(crossing, figures, rungs=rungs, bounds=bounds)
    if own is None:
        return best
    then_s = next(one for one in options if one.pair == best.pair).step_s(figures, HEADROOM)
    if own.step_s(figures, HEADROOM) > then_s * (1 + _WORTHWHILE_GAIN):
        return best
    safe = choose(crossing, figures, rungs=rungs, bounds=bounds, headroom=_CAUTIOUS_HEADROOM)
    milder = {one.pair for one in options if one.mildness < own.mildness}
    return safe if safe.pair in milder else None


def widen(pair: Pair, crossing: Crossing, *, rungs: Sequence[Rung], of_gradient: bool = False) -> Pair | None:
    """The next milder codec for one direction, None where there is none; the other stays where it can."""
    candidates = (_widened(pair, rung, of_gradient=of_gradient) for rung in reversed(rungs))
    measure = Pair.backward_bytes if of_gradient else Pair.forward_bytes
    return next(
        (one for one in candidates if one.is_possible and measure(one, crossing) > measure(pair, crossing)),
        None,
    )


def _widened(pair: Pair, rung: Rung, *, of_gradient: bool) -> Pair:
    if rung.is_joint or pair.has_subspace:
        return Pair(forward=rung.forward, backward=rung.backward)
    if of_gradient:
        return Pair(forward=pair.forward, backward=rung.backward)
    return Pair(forward=rung.forward, backward=pair.backward)


def _rung(forward: str, backward: str, loss: Loss, *, is_joint: bool = False) -> Rung:
    return Rung(forward=parse_codec(forward), backward=parse_codec(backward), loss=loss, is_joint=is_joint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """A codec that one direction may have; the job's own costs nothing that was not agreed to."""

    codec: CodecSpec
    index: int = 0
    loss: Loss = Loss.NONE
    joint: int | None = None
    """The rung that both directions must stand on if one does."""


def _sides(rungs: Sequence[Rung], codecs: Sequence[CodecSpec], own: CodecSpec | None) -> list[_Side]:
    if own is not None:
        return [_Side(codec=own)]
    return [
        _Side(codec=codec, index=index, loss=rung.loss, joint=index if rung.is_joint else None)
        for index, (rung, codec) in enumerate(zip(rungs, codecs, strict=True))
    ]


def _options(crossing: Crossing, figures: Figures, rungs: Sequence[Rung], bounds: Bounds) -> list[_Option]:
    """What is allowed; or all there is, where the job's own codec of one direction leaves nothing."""
    possible = [
        _option(down, up, crossing, figures)
        for down in _sides(rungs, [rung.forward for rung in rungs], bounds.forward)
        for up in _sides(rungs, [rung.backward for rung in rungs], bounds.backward)
        if _go_together(down, up, bounds)
    ]
    allowed = [option for option in possible if _is_allowed(option, crossing, bounds)]
    return allowed or possible


def _go_together(down: _Side, up: _Side, bounds: Bounds) -> bool:
    is_free = bounds.forward is None and bounds.backward is None
    if is_free and down.joint != up.joint:
        return False
    return Pair(forward=down.codec, backward=up.codec).is_possible


def _option(down: _Side, up: _Side, crossing: Crossing, figures: Figures) -> _Option:
    pair = Pair(forward=down.codec, backward=up.codec)
    return _Option(
        pair=pair,
        loss=max(down.loss, up.loss),
        rungs=(down.index, up.index),
        forward_s=8 * pair.forward_bytes(crossing) / figures.down_bps,
        backward_s=8 * pair.backward_bytes(crossing) / figures.up_bps,
    )


def _is_allowed(option: _Option, crossing: Crossing, bounds: Bounds) -> bool:
    return (
        option.loss <= bounds.loss
        and option.pair.forward_bytes(crossing) >= bounds.least_forward_bytes
        and option.pair.backward_bytes(crossing) >= bounds.least_backward_bytes
    )


def _explain(
    chosen: _Option, options: Sequence[_Option], crossing: Crossing, figures: Figures, bounds: Bounds
) -> Choice:
    pace_s = chosen.step_s(figures, 1.0)
    slower = [one for one in options if one.mildness < chosen.mildness]
    forward_s = {one.pair.forward: one.forward_s for one in slower} | {chosen.pair.forward: chosen.forward_s}
    backward_s = {one.pair.backward: one.backward_s for one in slower}
    backward_s |= {chosen.pair.backward: chosen.backward_s}
    paces = {"interval_s": figures.interval_s, "pace_s": pace_s}
    is_own = bounds.forward is not None
    reason = f"activations {_sentence(chosen.pair.forward, forward_s, is_own=is_own, **paces)}"
    if crossing.has_gradient:
        is_own = bounds.backward is not None
        reason += f"; gradients {_sentence(chosen.pair.backward, backward_s, is_own=is_own, **paces)}"
    return Choice(
        pair=chosen.pair,
        loss=chosen.loss,
        forward_s=chosen.forward_s,
        backward_s=chosen.backward_s,
        is_hidden=pace_s <= figures.interval_s,
        reason=reason,
    )


def _sentence(
    codec: CodecSpec, seconds: Mapping[CodecSpec, float], *, is_own: bool, interval_s: float, pace_s: float
) -> str:
    """Such as "raw: 12 ms on the line is hidden behind 30 ms of compute"; `seconds` has milder codecs too."""
    own_s, compute = seconds[codec], f"{format_duration(interval_s)} of compute"
    start = f"{codec}{', as the job says' if is_own else ''}: {format_duration(own_s)} on the line is"
    if own_s >= pace_s > interval_s:
        rest = 'codec = "auto" may find a faster one' if is_own else "no codec that is allowed is faster"
        return f"{start} more than {compute}, and {rest}"
    reason = f"hidden behind {compute}"
    if own_s > interval_s:
        reason = f"less than the {format_duration(pace_s)} of the other direction"
    slower = [(other_s, str(other)) for other, other_s in seconds.items() if other_s > own_s]
    if slower:
        reason += f", {min(slower)[1]} would take {format_duration(min(slower)[0])}"
    return f"{start} {reason}"
