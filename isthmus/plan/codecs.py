"""The codec levels of a link, from the least lossy on, and which of them it gets.

A link gets only as much compression as computation does not overlap already: where computing overlaps all of
the transfer it stays `raw`. Within that, each direction takes the least lossy level with which a step is as
fast as with any. The planner asks with planned figures, the workers with measured ones; the same figures give
the same answer everywhere. A basis that has to be sent counts by the steps that it serves.
"""

import enum
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator, ConfigDict, PlainSerializer

from isthmus.errors import FieldError, FrameError
from isthmus.job.codec import CodecSpec, gradient_codec, gradient_wire_bytes, parse_codec, read_codec
from isthmus.job.codec_steps import TAG_BYTES, SameBasis, SameIndices, Subspace, edition_bytes, num_editions
from isthmus.units import format_duration

_SHARES_OF_WIDTH: Final = (4, 8, 16)
_LEAST_RANK: Final = 8


class Loss(enum.IntEnum):
    """How much quality a codec may cost, by what it cost a small language model (docs/results.md)."""

    NONE = 0
    SLIGHT = 1
    """Less than a few seeds could show: 8 bits cost 0.0 % of the loss over one cut and over three."""
    SOME = 2
    """Little, and it can be measured: 4 bits cost 0.5 % of the loss over one cut and 1.4 % over three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecLevel:
    """A codec for each direction; `is_joint` where they make sense only together."""

    forward: CodecSpec
    backward: CodecSpec
    loss: Loss
    is_joint: bool = False


# What codecs cost at each cut, as a share of the validation loss; it adds up over the cuts of a pipeline.
# bf16 and subspaces were not measured: their figures only keep the order of the levels.
_LOSS_PER_CUT: Final = {"subspace": 0.01, "int4": 0.005, "int8": 0.0001, "bf16": 0.00001}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The steps that codecs are chosen for; every pair of ranks has a learner of its own."""

    num_steps: int
    num_microbatches: int
    num_learners: int = 1

    def __post_init__(self) -> None:
        if min(self.num_steps, self.num_microbatches, self.num_learners) < 1:
            raise ValueError(f"nothing crosses in {self}")

    @property
    def num_messages(self) -> int:
        """Each way, of all steps."""
        return self.num_steps * self.num_microbatches

    @property
    def num_at_once(self) -> int:
        """Ranks that send at the same time when a step begins, and when it ends."""
        return min(self.num_learners, self.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What one micro-batch puts across a cut; above frozen layers nothing goes back."""

    num_rows: int
    width: int
    element_bytes: int = 4
    """Of an element that crosses raw."""
    has_gradient: bool = True
    stretch: Stretch | None = None
    """None for a run without end, in which editions count for nothing."""


CodecText = Annotated[CodecSpec, BeforeValidator(read_codec), PlainSerializer(str, return_type=str)]
"""A codec that crosses and is kept as its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The codecs of a link."""

    forward: CodecText
    backward: CodecText

    @property
    def is_possible(self) -> bool:
        """Whether gradients can cross as the backward codec says, behind this forward codec."""
        try:
            gradient_codec(self.forward, self.backward)
        except FieldError:
            return False
        return True

    @property
    def subspace(self) -> Subspace | None:
        """The step by which activations and gradients share a basis, which is learned."""
        return next((step for step in self.forward.steps if isinstance(step, Subspace)), None)

    @property
    def has_subspace(self) -> bool:
        """Whether there is one."""
        return self.subspace is not None

    @property
    def projects_gradients(self) -> bool:
        """Whether gradients cross only where their activation did: what stays behind is no error."""
        steps = gradient_codec(self.forward, self.backward).steps
        return any(isinstance(step, SameBasis | SameIndices) for step in steps)

    def forward_bytes(self, crossing: Crossing) -> int:
        """Bytes of an activation on the line, without the editions that some bring along."""
        return self.forward.wire_bytes(
            crossing.num_rows, crossing.width, element_bytes=crossing.element_bytes
        )

    def edition_bytes(self, crossing: Crossing, *, age: int = 0) -> float:
        """Bytes that editions add to an activation, on average; codes that hold already have an age."""
        subspace, stretch = self.subspace, crossing.stretch
        if subspace is None or stretch is None:
            return 0.0
        num = stretch.num_learners * num_editions(subspace, stretch.num_steps, age=age)
        return num * (edition_bytes(subspace, crossing.width) - TAG_BYTES) / stretch.num_messages

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

    def bytes_both_ways(self, crossing: Crossing) -> int:
        """Bytes of an activation and its gradient."""
        return self.forward_bytes(crossing) + self.backward_bytes(crossing)


RAW: Final = parse_codec("raw")
RAW_PAIR: Final = Pair(forward=RAW, backward=RAW)


def texts_of(pair: Pair) -> tuple[str, str]:
    """The codec of activations and that of gradients, as one-line texts."""
    return str(pair.forward), str(pair.backward)


def read_pair(texts: object) -> Pair:
    """The codecs that a peer or a checkpoint names."""
    match texts:
        case [str(forward), str(backward)]:
            return _parse_pair(forward, backward)
    raise FrameError(f"no two codecs of a link are named by {str(texts)[:100]}")


@functools.lru_cache(maxsize=1024)
def _parse_pair(forward: str, backward: str) -> Pair:
    try:
        pair = Pair(forward=parse_codec(forward), backward=parse_codec(backward))
    except ValueError as error:
        raise FrameError(f"a codec that cannot be: {str(error)[:200]}") from error
    if not pair.is_possible:
        raise FrameError(f"gradients by {backward[:100]!r} cannot follow activations by {forward[:100]!r}")
    return pair


def expected_loss(pairs: Iterable[Pair]) -> float:
    """What codecs cost over all cuts, as a share of the loss: the more the more cuts there are."""
    return sum(max(_loss_per_cut(one.forward), _loss_per_cut(one.backward)) for one in pairs)


def _loss_per_cut(codec: CodecSpec) -> float:
    return max((share for name, share in _LOSS_PER_CUT.items() if name in str(codec)), default=0.0)


def num_learners(num_senders: int, num_receivers: int) -> int:
    """Pairs of ranks that speak across a cut when the ranks at both sides take turns."""
    return math.lcm(num_senders, num_receivers)


def codec_levels(width: int, *, shares_ids: bool = False) -> tuple[CodecLevel, ...]:
    """The codecs for cuts of this width, least lossy first; anchors only where token ids may cross."""
    plain = (
        _level("raw", "raw", Loss.NONE),
        _level("bf16", "bf16", Loss.SLIGHT),
        _level("rotate | int8", "rotate | int8(stochastic)", Loss.SLIGHT),
        _level("center | rotate | int4", "rotate | int4(stochastic)", Loss.SOME),
    )
    anchor = ", anchor=tokens" if shares_ids else ""
    ranks = [rank for share in _SHARES_OF_WIDTH if (rank := width // share) >= _LEAST_RANK]
    joint = (
        _level(f"subspace({rank}{anchor}) | int4", "int4(stochastic)", Loss.SOME, is_joint=True)
        for rank in ranks
    )
    return (*plain, *joint)


def widen(
    pair: Pair, crossing: Crossing, *, rungs: Sequence[CodecLevel], of_gradient: bool = False
) -> Pair | None:
    """The next less lossy codec for one direction, None where there is none; the other stays where it can."""
    candidates = (_widened(pair, rung, of_gradient=of_gradient) for rung in reversed(rungs))
    measure = Pair.backward_bytes if of_gradient else Pair.forward_bytes
    return next(
        (one for one in candidates if one.is_possible and measure(one, crossing) > measure(pair, crossing)),
        None,
    )


def _widened(pair: Pair, rung: CodecLevel, *, of_gradient: bool) -> Pair:
    if rung.is_joint or pair.has_subspace:
        return Pair(forward=rung.forward, backward=rung.backward)
    if of_gradient:
        return Pair(forward=pair.forward, backward=rung.backward)
    return Pair(forward=rung.forward, backward=pair.backward)


def _level(forward: str, backward: str, loss: Loss, *, is_joint: bool = False) -> CodecLevel:
    return CodecLevel(
        forward=parse_codec(forward), backward=parse_codec(backward), loss=loss, is_joint=is_joint
    )


HEADROOM: Final = 0.9
"""A transfer counts as hidden up to this share of the interval: links are not always at their best."""

# Codecs whose steps take about as long are equals, and the least lossy of them is taken.
_TOLERANCE: Final = 0.05
# Figures that move to and fro must not move the codec with them: what was chosen with the usual headroom is
# left for a stronger one only when it is over the interval by this, for a less lossy one with more to spare.
_WORTHWHILE_GAIN: Final = 0.09
_CAUTIOUS_HEADROOM: Final = 0.8


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

    # The bounds may be infinite, and cross between clouds.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    loss: Loss = Loss.SLIGHT
    forward: CodecText | None = None
    """The job's own codec of activations, None where it is free."""
    backward: CodecText | None = None
    least_forward_bytes: int = 0
    """Where the guard has found codecs with fewer bytes too strong."""
    least_backward_bytes: int = 0
    most_forward_bytes: float = math.inf
    """Where money counts, and codecs with more bytes would cost more than was planned."""
    most_backward_bytes: float = math.inf


DEFAULT_BOUNDS: Final = Bounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The codecs chosen for a link, the time of a message of each on the line, and why.

    `edition_s` is what editions add to an activation, on average.
    """

    pair: Pair
    loss: Loss
    forward_s: float
    backward_s: float
    edition_s: float
    is_hidden: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A pair that is allowed: its level in each direction, and how fast it is."""

    pair: Pair
    loss: Loss
    rungs: tuple[int, int]
    forward_s: float
    backward_s: float
    edition_s: float
    num_microbatches: int | None
    num_at_once: int = 1
    """Ranks that send at the same time, and so share the line, at the ends of a step."""
    is_joint: bool = False

    @property
    def grade(self) -> tuple[int, bool]:
        """What it costs, roughly; within a class of loss, a learned basis costs more than fewer bits."""
        return self.loss, self.is_joint

    @property
    def lossiness(self) -> tuple[int, int, int, int]:
        """Sorts by the stronger direction first; between equals the gradient is spared."""
        return (self.loss, max(self.rungs), sum(self.rungs), self.rungs[1])

    def pace_s(self, figures: Figures, headroom: float = 1.0) -> float:
        """What a micro-batch takes in the long run: the slowest of computation and both directions."""
        return max(figures.interval_s, self.forward_s / headroom, self.backward_s / headroom)

    def is_hidden(self, figures: Figures, headroom: float) -> bool:
        """Whether computing goes on behind both directions; there is nothing else to compute beside one."""
        return self.num_microbatches != 1 and self.pace_s(figures, headroom) <= figures.interval_s

    def step_s(self, figures: Figures, headroom: float) -> float:
        """The same with what nothing hides: a step's first activation, its edition, and its last gradient."""
        ends_s = self.num_at_once * (self.forward_s + self.backward_s) / (self.num_microbatches or math.inf)
        return self.pace_s(figures, headroom) + ends_s + self.edition_s


def choose(
    crossing: Crossing,
    figures: Figures,
    *,
    rungs: Sequence[CodecLevel],
    bounds: Bounds = DEFAULT_BOUNDS,
    tolerance: float = _TOLERANCE,
) -> Choice:
    """The least lossy codecs with which a step takes no longer, to a tolerance, than with any other."""
    options = _options(crossing, figures, rungs, bounds)
    return _explain(_least_lossy(options, figures, HEADROOM, tolerance), options, crossing, figures, bounds)


def allowed_pairs(
    crossing: Crossing, figures: Figures, *, rungs: Sequence[CodecLevel], bounds: Bounds = DEFAULT_BOUNDS
) -> list[Pair]:
    """All codecs that `choose` chooses from."""
    return [one.pair for one in _options(crossing, figures, rungs, bounds)]


def chosen(
    pair: Pair,
    crossing: Crossing,
    figures: Figures,
    *,
    rungs: Sequence[CodecLevel],
    bounds: Bounds = DEFAULT_BOUNDS,
) -> Choice:
    """One of the codecs that are allowed, with what `choose` would say of it."""
    options = _options(crossing, figures, rungs, bounds)
    own = next(one for one in options if one.pair == pair)
    return _explain(own, options, crossing, figures, bounds)


def reconsider(
    current: Pair,
    crossing: Crossing,
    figures: Figures,
    *,
    rungs: Sequence[CodecLevel],
    bounds: Bounds = DEFAULT_BOUNDS,
    age: int = 0,
) -> Choice | None:
    """What to change to, None to stay: stronger only for a real gain, less lossy only with room to spare.

    A basis that has been in use for `age` steps has most of its editions behind it; any other begins anew.
    """
    options = [
        _aged(one, crossing, figures, age) if one.pair == current else one
        for one in _options(crossing, figures, rungs, bounds)
    ]
    own = next((one for one in options if one.pair == current), None)
    if own is None:
        return _explain(_least_lossy(options, figures, HEADROOM), options, crossing, figures, bounds)
    rivals = _rivals(own, options, figures)
    best, safe = (_least_lossy(rivals, figures, headroom) for headroom in (HEADROOM, _CAUTIOUS_HEADROOM))
    if safe.lossiness < own.lossiness:
        return _explain(safe, options, crossing, figures, bounds)
    if best.grade < own.grade:
        # There is something less lossy, but with too little to spare.
        best = safe
    is_worthwhile = best != own and _is_slow(own, rivals, best.grade, figures)
    return _explain(best, options, crossing, figures, bounds) if is_worthwhile else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """A codec that one direction may have; the job's own costs nothing that was not agreed to."""

    codec: CodecSpec
    index: int = 0
    loss: Loss = Loss.NONE
    joint: int | None = None
    """The level that both directions must have if one does."""


def _sides(rungs: Sequence[CodecLevel], codecs: Sequence[CodecSpec], own: CodecSpec | None) -> list[_Side]:
    if own is not None:
        return [_Side(codec=own)]
    return [
        _Side(codec=codec, index=index, loss=rung.loss, joint=index if rung.is_joint else None)
        for index, (rung, codec) in enumerate(zip(rungs, codecs, strict=True))
    ]


def _options(
    crossing: Crossing, figures: Figures, rungs: Sequence[CodecLevel], bounds: Bounds
) -> list[_Option]:
    """What is allowed and not too dear, or else the cheapest of it.

    All there is, where the job's own codec of one direction leaves nothing.
    """
    possible = [
        _option(down, up, crossing, figures)
        for down in _sides(rungs, [rung.forward for rung in rungs], bounds.forward)
        for up in _sides(rungs, [rung.backward for rung in rungs], bounds.backward)
        if _go_together(down, up, bounds) and _suit(down, up, crossing, figures, bounds)
    ]
    allowed = [option for option in possible if _is_allowed(option, crossing, bounds)]
    if not allowed:
        return possible
    cheap = [option for option in allowed if _is_cheap(option, crossing, bounds)]
    return cheap or [min(allowed, key=lambda option: option.pair.bytes_both_ways(crossing))]


def _go_together(down: _Side, up: _Side, bounds: Bounds) -> bool:
    is_free = bounds.forward is None and bounds.backward is None
    if is_free and down.joint != up.joint:
        return False
    return Pair(forward=down.codec, backward=up.codec).is_possible


def _suit(down: _Side, up: _Side, crossing: Crossing, figures: Figures, bounds: Bounds) -> bool:
    """Whether the wider direction has no stronger codec than the narrower; between equals, the gradient."""
    if bounds.forward is not None or bounds.backward is not None or not crossing.has_gradient:
        return True
    return up.index <= down.index if figures.up_bps >= figures.down_bps else down.index <= up.index


def _option(down: _Side, up: _Side, crossing: Crossing, figures: Figures) -> _Option:
    pair = Pair(forward=down.codec, backward=up.codec)
    return _Option(
        pair=pair,
        loss=max(down.loss, up.loss),
        rungs=(down.index, up.index),
        forward_s=8 * pair.forward_bytes(crossing) / figures.down_bps,
        backward_s=8 * pair.backward_bytes(crossing) / figures.up_bps,
        edition_s=8 * pair.edition_bytes(crossing) / figures.down_bps,
        num_microbatches=None if crossing.stretch is None else crossing.stretch.num_microbatches,
        num_at_once=1 if crossing.stretch is None else crossing.stretch.num_at_once,
        is_joint=down.joint is not None,
    )


def _aged(option: _Option, crossing: Crossing, figures: Figures, age: int) -> _Option:
    return replace(option, edition_s=8 * option.pair.edition_bytes(crossing, age=age) / figures.down_bps)


def _is_allowed(option: _Option, crossing: Crossing, bounds: Bounds) -> bool:
    return (
        option.loss <= bounds.loss
        and option.pair.forward_bytes(crossing) >= bounds.least_forward_bytes
        and option.pair.backward_bytes(crossing) >= bounds.least_backward_bytes
    )


def _is_cheap(option: _Option, crossing: Crossing, bounds: Bounds) -> bool:
    return (
        option.pair.forward_bytes(crossing) <= bounds.most_forward_bytes
        and option.pair.backward_bytes(crossing) <= bounds.most_backward_bytes
    )


def _least_lossy(
    options: Sequence[_Option], figures: Figures, headroom: float, tolerance: float = _TOLERANCE
) -> _Option:
    """The least lossy of the fastest, among those of the least loss that hides the link if one does."""
    for grade in sorted({one.grade for one in options}):
        enough = [one for one in options if one.grade <= grade]
        if any(one.is_hidden(figures, headroom) for one in enough):
            return _least_lossy_of_the_fastest(enough, figures, headroom, tolerance)
    return _least_lossy_of_the_fastest(options, figures, headroom, tolerance)


def _least_lossy_of_the_fastest(
    options: Sequence[_Option], figures: Figures, headroom: float, tolerance: float
) -> _Option:
    fastest_s = min(one.step_s(figures, headroom) for one in options)
    as_fast = (one for one in options if one.step_s(figures, headroom) <= fastest_s * (1 + tolerance))
    return min(as_fast, key=lambda one: one.lossiness)


def _rivals(own: _Option, options: Sequence[_Option], figures: Figures) -> Sequence[_Option]:
    """What own may be left for: nothing that loses more, while the link is hidden."""
    return [one for one in options if one.grade <= own.grade] if own.is_hidden(figures, 1.0) else options


def _is_slow(own: _Option, rivals: Sequence[_Option], grade: tuple[int, bool], figures: Figures) -> bool:
    """Whether steps could be shorter by far with no more than this loss."""
    fastest_s = min(one.step_s(figures, 1.0) for one in rivals if one.grade <= grade)
    return own.step_s(figures, 1.0) > fastest_s * (1 + _WORTHWHILE_GAIN)


def _explain(
    chosen: _Option, options: Sequence[_Option], crossing: Crossing, figures: Figures, bounds: Bounds
) -> Choice:
    pace_s = chosen.pace_s(figures)
    slower = [one for one in options if one.lossiness < chosen.lossiness]
    forward_s = {one.pair.forward: one.forward_s for one in slower} | {chosen.pair.forward: chosen.forward_s}
    backward_s = {one.pair.backward: one.backward_s for one in slower}
    backward_s |= {chosen.pair.backward: chosen.backward_s}
    has_faster = any(one.pace_s(figures) < pace_s for one in options)
    scene = _Scene(interval_s=figures.interval_s, pace_s=pace_s, has_faster=has_faster)
    told = scene.sentence(
        chosen.pair.forward, forward_s, author=_author(bounds.forward, bounds.least_forward_bytes)
    )
    reason = f"activations {told}"
    if chosen.edition_s:
        reason += f", its basis adds {format_duration(chosen.edition_s)}"
    if crossing.has_gradient:
        told = scene.sentence(
            chosen.pair.backward, backward_s, author=_author(bounds.backward, bounds.least_backward_bytes)
        )
        reason += f"; gradients {told}"
    return Choice(
        pair=chosen.pair,
        loss=chosen.loss,
        forward_s=chosen.forward_s,
        backward_s=chosen.backward_s,
        edition_s=chosen.edition_s,
        is_hidden=pace_s <= figures.interval_s,
        reason=reason,
    )


def _author(own: CodecSpec | None, least_bytes: int) -> str:
    """Who gave a direction its codec, where it is not chosen here: the guard, if the job's was too strong."""
    if own is None:
        return ""
    return "as the guard has it" if least_bytes else "as the job says"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """What both directions are told against; `has_faster` where only a basis makes stronger codecs slower."""

    interval_s: float
    pace_s: float
    has_faster: bool

    def sentence(self, codec: CodecSpec, seconds: Mapping[CodecSpec, float], *, author: str) -> str:
        """Says, for example, "raw: 12 ms on the line is hidden behind 30 ms of compute"."""
        own_s, compute = seconds[codec], f"{format_duration(self.interval_s)} of compute"
        start = f"{codec}{f', {author}' if author else ''}: {format_duration(own_s)} on the line is"
        if own_s >= self.pace_s > self.interval_s:
            return f"{start} more than {compute}, and {self._excuse(is_own=bool(author))}"
        reason = f"hidden behind {compute}"
        if own_s > self.interval_s:
            reason = f"less than the {format_duration(self.pace_s)} of the other direction"
        slower = [(other_s, str(other)) for other, other_s in seconds.items() if other_s > own_s]
        return f"{start} {reason}{self._contrast(*min(slower)) if slower else ''}"

    def _contrast(self, other_s: float, other: str) -> str:
        """What a less lossy codec would take on the line, or if that is hidden too, at the ends of a step."""
        if other_s > self.interval_s:
            return f", {other} would take {format_duration(other_s)}"
        return (
            f", and at the ends of a step, which nothing hides, {other} would take {format_duration(other_s)}"
        )

    def _excuse(self, *, is_own: bool) -> str:
        if is_own:
            return 'codec = "auto" may find a faster one'
        counted = " once its basis is counted" if self.has_faster else ""
        return f"no codec that is allowed is faster{counted}"
