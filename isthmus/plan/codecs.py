"""The codec levels of a link, from the least lossy on, and which of them it gets.

A link gets only as much compression as computation does not overlap already: where computing overlaps all of
the transfer it stays `raw`. Within that, each direction takes the least lossy level with which a step is as
fast as with any. The planner chooses with planned figures, the workers with measured ones; the same figures
give the same choice everywhere. A basis that has to be sent counts by the steps that it serves.

While a run goes on, the first stage steers the codecs of all cuts, from what all stages measured. Every
member gets the decision with the verdict on a step and writes it into its messages, so both ends of a cut
change at the same step.
"""

import enum
import functools
import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator, ConfigDict, PlainSerializer

from isthmus.errors import FieldError, FrameError
from isthmus.job.codec import CodecSpec, gradient_codec, parse_codec, read_codec
from isthmus.job.codec_steps import (
    NUM_ANCHOR_SLOTS,
    Anchor,
    Feedback,
    SameBasis,
    SameIndices,
    Subspace,
    Svd,
    basis_bytes,
    num_directions,
    num_versions,
    svd_rank,
)
from isthmus.plan.end_of_step import Cosines, Tally, Texts
from isthmus.plan.scenario import Hop
from isthmus.plan.types import Count, Facts
from isthmus.units import format_duration, shorten

_SHARES_OF_WIDTH: Final = (4, 8, 16)
_LEAST_RANK: Final = 8
# What codecs keep is float32.
_STATE_ELEMENT_BYTES: Final = 4


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What one micro-batch puts across a cut, and how often; above frozen layers nothing goes back."""

    num_rows: int
    width: int
    element_bytes: int = 4
    """The size of an element that crosses raw."""
    has_gradient: bool = True
    num_steps: int | None = None
    """The steps that codecs are chosen for; None for a run without end, where a basis counts for nothing."""
    num_microbatches: int | None = None
    num_learners: int = 1
    """The pairs of ranks that speak across the cut: each learns a basis of its own."""

    def __post_init__(self) -> None:
        counts = self.num_steps, self.num_microbatches, self.num_learners
        if any(one is not None and one < 1 for one in counts):
            raise ValueError(f"nothing crosses in {self}")


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
    def projects_gradients(self) -> bool:
        """Whether gradients cross only where their activation did: what stays behind is no error."""
        steps = gradient_codec(self.forward, self.backward).steps
        return any(isinstance(step, SameBasis | SameIndices) for step in steps)

    def forward_bytes(self, crossing: Crossing) -> int:
        """Bytes of an activation on the line, without the versions of a basis that some bring along."""
        return self.forward.wire_bytes(
            crossing.num_rows, crossing.width, element_bytes=crossing.element_bytes
        )

    def basis_bytes(self, crossing: Crossing, *, age: int = 0) -> float:
        """Bytes that versions of a basis add to an activation, on average; one in use has an age in steps."""
        subspace, num_steps = self.subspace, crossing.num_steps
        if subspace is None or num_steps is None:
            return 0.0
        num = crossing.num_learners * num_versions(subspace, num_steps, age=age)
        num_messages = num_steps * (crossing.num_microbatches or 1)
        return num * basis_bytes(subspace, crossing.width) / num_messages

    def backward_bytes(self, crossing: Crossing) -> int:
        """Bytes of a gradient on the line."""
        if not crossing.has_gradient:
            return 0
        return gradient_codec(self.forward, self.backward).wire_bytes(
            crossing.num_rows, crossing.width, element_bytes=crossing.element_bytes
        )

    def state_bytes(self, crossing: Crossing) -> tuple[int, int]:
        """What these keep between messages on one wire, at the sending and at the receiving stage.

        Error feedback keeps what the last message lost, an SVD the directions of the last message. A subspace
        keeps its basis at both ends, and what it learns the next one from at the sender of activations.
        """
        shape = crossing.num_rows, crossing.width
        learned, basis = _subspace_state_bytes(self.forward, crossing.width)
        sender_bytes = _sender_state_bytes(self.forward, *shape) + learned + basis
        gradients = gradient_codec(self.forward, self.backward)
        return sender_bytes, basis + (_sender_state_bytes(gradients, *shape) if crossing.has_gradient else 0)


def _sender_state_bytes(codec: CodecSpec, num_rows: int, width: int) -> int:
    num_elements = 0
    for step in codec.steps:
        match step:
            case Feedback():
                num_elements += num_rows * width
            case Svd(ratio=ratio):
                num_elements += width * (svd_rank(ratio, num_rows, width) or 0)
    return _STATE_ELEMENT_BYTES * num_elements


def _subspace_state_bytes(codec: CodecSpec, width: int) -> tuple[int, int]:
    """Count the sums that a basis is learned from, and the basis with its anchors by token id."""
    match codec.steps:
        case (Subspace() as subspace, *_):
            num_slots = NUM_ANCHOR_SLOTS if subspace.anchor is Anchor.TOKENS else 0
            # A sum, two weights and the number of a row for each slot.
            learned = _STATE_ELEMENT_BYTES * (width * width + width + num_slots * (width + 4))
            basis = _STATE_ELEMENT_BYTES * width * (1 + num_directions(subspace, width))
            return learned, basis + 2 * num_slots * width
    return 0, 0


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


def num_learners(num_senders: int, num_receivers: int) -> int:
    """Pairs of ranks that speak across a cut when the ranks at both sides take turns."""
    return math.lcm(num_senders, num_receivers)


def codec_levels(width: int, *, shares_ids: bool = False) -> tuple[CodecLevel, ...]:
    """The codecs for cuts of this width, least lossy first; anchors only where token ids may cross."""
    separate = (
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
    return (*separate, *joint)


def less_lossy(
    pair: Pair, crossing: Crossing, *, levels: Sequence[CodecLevel], of_gradient: bool = False
) -> Pair | None:
    """The next less lossy codec for one direction, None where there is none; the other stays where it can."""
    num_bytes = Pair.backward_bytes if of_gradient else Pair.forward_bytes
    for level in reversed(levels):
        forward, backward = level.forward, level.backward
        if not level.is_joint and pair.subspace is None:
            forward, backward = (pair.forward, backward) if of_gradient else (forward, pair.backward)
        other = Pair(forward=forward, backward=backward)
        if other.is_possible and num_bytes(other, crossing) > num_bytes(pair, crossing):
            return other
    return None


def _level(forward: str, backward: str, loss: Loss, *, is_joint: bool = False) -> CodecLevel:
    return CodecLevel(
        forward=parse_codec(forward), backward=parse_codec(backward), loss=loss, is_joint=is_joint
    )


# A transfer counts as overlapped up to this share of the interval: links are not always at their best.
_HEADROOM: Final = 0.9
# Codecs whose steps take about as long are equals, and the least lossy of them is taken.
_TOLERANCE: Final = 0.05
# Figures that move to and fro must not move the codec with them: what was chosen with the usual headroom is
# left for a lossier one only when it is over the interval by this, for a less lossy one with more to spare.
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
    """The guard has found codecs with fewer bytes too lossy."""
    least_backward_bytes: int = 0
    most_forward_bytes: float = math.inf
    """Where money counts, codecs with more bytes would cost more than was planned."""
    most_backward_bytes: float = math.inf

    @property
    def are_open(self) -> bool:
        """Whether the job leaves both directions free."""
        return self.forward is None and self.backward is None

    def allow(self, loss: Loss, forward_bytes: int, backward_bytes: int) -> bool:
        """Whether neither the job nor the guard rules a pair out."""
        is_enough = forward_bytes >= self.least_forward_bytes and backward_bytes >= self.least_backward_bytes
        return loss <= self.loss and is_enough


DEFAULT_BOUNDS: Final = Bounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Codecs for a link: their level in each direction, and the time of a message of each on the line."""

    pair: Pair
    loss: Loss
    levels: tuple[int, int]
    is_joint: bool
    forward_s: float
    backward_s: float
    basis_s: float
    """What versions of a basis add to an activation, on average."""
    interval_s: float
    crossing: Crossing
    reason: str = ""

    @property
    def grade(self) -> tuple[int, bool]:
        """What it costs, roughly; within a class of loss, a learned basis costs more than fewer bits."""
        return self.loss, self.is_joint

    @property
    def lossiness(self) -> tuple[int, int, int, int]:
        """Sorts by the lossier direction first; between equals the less lossy gradient comes first."""
        return (self.loss, max(self.levels), sum(self.levels), self.levels[1])

    def pace_s(self, headroom: float = 1.0) -> float:
        """What a micro-batch takes in the long run: the slowest of computation and both directions."""
        return max(self.interval_s, self.forward_s / headroom, self.backward_s / headroom)

    def is_overlapped(self, headroom: float) -> bool:
        """Whether computing goes on beside both directions; beside a single micro-batch there is none."""
        return self.crossing.num_microbatches != 1 and self.pace_s(headroom) <= self.interval_s

    def step_s(self, headroom: float) -> float:
        """The pace and what nothing overlaps: a step's first activation, its basis, and its last gradient."""
        num_microbatches = self.crossing.num_microbatches or math.inf
        # Ranks that send at the same time when a step begins, and when it ends.
        num_at_once = min(self.crossing.num_learners, num_microbatches)
        ends_s = num_at_once * (self.forward_s + self.backward_s) / num_microbatches
        return self.pace_s(headroom) + ends_s + self.basis_s


def choose(
    crossing: Crossing,
    figures: Figures,
    *,
    levels: Sequence[CodecLevel],
    bounds: Bounds = DEFAULT_BOUNDS,
    tolerance: float = _TOLERANCE,
    current: Pair | None = None,
    age: int = 0,
) -> Choice:
    """The least lossy codecs with which a step takes no longer, to a tolerance, than with any other.

    A link that has codecs already leaves them for lossier ones only for a real gain, and for less lossy ones
    only with room to spare. A basis that has been in use for `age` steps has most of its versions behind it.
    """
    allowed = options(crossing, figures, levels=levels, bounds=bounds)
    own = next((one for one in allowed if one.pair == current), None)
    if own is None:
        return explained(_least_lossy(allowed, _HEADROOM, tolerance), allowed, bounds)
    aged = replace(own, basis_s=8 * own.pair.basis_bytes(crossing, age=age) / figures.down_bps)
    allowed = [aged if one is own else one for one in allowed]
    return explained(_changed(aged, allowed), allowed, bounds)


def _changed(own: Choice, allowed: Sequence[Choice]) -> Choice:
    # While the link is overlapped, nothing that loses more is worth a change.
    rivals = [one for one in allowed if one.grade <= own.grade] if own.is_overlapped(1.0) else allowed
    best, safe = (_least_lossy(rivals, headroom) for headroom in (_HEADROOM, _CAUTIOUS_HEADROOM))
    if safe.lossiness < own.lossiness:
        return safe
    if best.grade < own.grade:
        # There is something less lossy, but with too little to spare.
        best = safe
    fastest_s = min(one.step_s(1.0) for one in rivals if one.grade <= best.grade)
    return best if own.step_s(1.0) > fastest_s * (1 + _WORTHWHILE_GAIN) else own


def options(
    crossing: Crossing, figures: Figures, *, levels: Sequence[CodecLevel], bounds: Bounds = DEFAULT_BOUNDS
) -> list[Choice]:
    """What is allowed and not too dear, or else the cheapest of it.

    All there is, where the job's own codec of one direction leaves nothing. Where the job leaves both free,
    the wider direction has no lossier codec than the narrower one; between equals, that is the gradient.
    """
    is_up_wide = figures.up_bps >= figures.down_bps
    possible = []
    for pair, loss, (down, up), is_joint in _ways(tuple(levels), bounds.forward, bounds.backward):
        if bounds.are_open and crossing.has_gradient and (up > down if is_up_wide else down > up):
            continue
        size = pair.forward_bytes(crossing), pair.backward_bytes(crossing)
        choice = Choice(
            pair=pair,
            loss=loss,
            levels=(down, up),
            is_joint=is_joint,
            forward_s=8 * size[0] / figures.down_bps,
            backward_s=8 * size[1] / figures.up_bps,
            basis_s=8 * pair.basis_bytes(crossing) / figures.down_bps,
            interval_s=figures.interval_s,
            crossing=crossing,
        )
        possible.append((choice, size))
    allowed = [(one, size) for one, size in possible if bounds.allow(one.loss, *size)]
    if not allowed:
        return [one for one, _ in possible]
    most = bounds.most_forward_bytes, bounds.most_backward_bytes
    cheap = [one for one, size in allowed if size[0] <= most[0] and size[1] <= most[1]]
    return cheap or [min(allowed, key=lambda found: sum(found[1]))[0]]


@functools.lru_cache(maxsize=256)
def _ways(
    levels: tuple[CodecLevel, ...], forward: CodecSpec | None, backward: CodecSpec | None
) -> Sequence[tuple[Pair, Loss, tuple[int, int], bool]]:
    """Every pair of codecs that can be, with its loss and levels, and whether it makes sense only so.

    The job's own codec costs nothing that was not agreed to. A joint level needs itself in the other
    direction.
    """
    found = []
    owns = [
        (CodecLevel(forward=one, backward=one, loss=Loss.NONE),) if one else levels
        for one in (forward, backward)
    ]
    for (down, first), (up, second) in itertools.product(*map(enumerate, owns)):
        pair, is_joint = (
            Pair(forward=first.forward, backward=second.backward),
            first.is_joint or second.is_joint,
        )
        is_alone = is_joint and down != up and forward is None and backward is None
        if pair.is_possible and not is_alone:
            found.append((pair, max(first.loss, second.loss), (down, up), first.is_joint))
    return found


def _least_lossy(allowed: Sequence[Choice], headroom: float, tolerance: float = _TOLERANCE) -> Choice:
    """The least lossy of the fastest, among those of the least loss that overlaps the link if one does."""
    enough = allowed
    for grade in sorted({one.grade for one in allowed}):
        some = [one for one in allowed if one.grade <= grade]
        if any(one.is_overlapped(headroom) for one in some):
            enough = some
            break
    fastest_s = min(one.step_s(headroom) for one in enough)
    as_fast = (one for one in enough if one.step_s(headroom) <= fastest_s * (1 + tolerance))
    return min(as_fast, key=lambda one: one.lossiness)


def explained(choice: Choice, allowed: Sequence[Choice], bounds: Bounds) -> Choice:
    """A choice with its reason: beside what it was chosen from."""
    less_lossy = [one for one in allowed if one.lossiness < choice.lossiness]
    compute = format_duration(choice.interval_s)

    def sentence(what: str, codec: CodecSpec, own: CodecSpec | None, others_s: dict[CodecSpec, float]) -> str:
        own_s = others_s.pop(codec)
        slower = [(other_s, str(other)) for other, other_s in others_s.items() if other_s > own_s]
        author = "" if own is None else ", as it was given"
        other = f", {min(slower)[1]} would take {format_duration(min(slower)[0])}" if slower else ""
        return (
            f"{what} {codec}{author}: {format_duration(own_s)} on the line beside {compute} of compute{other}"
        )

    forward_s = {one.pair.forward: one.forward_s for one in (*less_lossy, choice)}
    reason = sentence("activations", choice.pair.forward, bounds.forward, forward_s)
    if choice.basis_s:
        reason += f", its basis adds {format_duration(choice.basis_s)}"
    if choice.crossing.has_gradient:
        backward_s = {one.pair.backward: one.backward_s for one in (*less_lossy, choice)}
        reason += f"; {sentence('gradients', choice.pair.backward, bounds.backward, backward_s)}"
    return replace(choice, reason=reason)


LEAST_COSINE: Final = 0.98
# A basis is renewed after 1, 2, 4 and 8 steps: until then a poor one is on its way out.
_YOUNG_STEPS: Final = 16
# The first step of a process warms everything up, and one step is no measurement.
_NUM_WARM_UP_STEPS: Final = 1
_NUM_STEPS: Final = 3
# More of them are a better one, as long as the line stays what it was.
_MOST_STEPS: Final = 9
_OTHER_LINE: Final = 0.15
# What is shorter on the line cannot be told from the time that threads take to wake up.
_LEAST_ON_LINE_S: Final = 0.005
# And nothing is handed over in less: the line is at least as fast as this would make it.
_LEAST_MEASURED_S: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One cut between two stages, as the schedulers know it.

    `codecs` are those with which it starts, once the warm-up of a bottleneck is over. Every `guard_every`-th
    message is measured by its sender; 0 for none.
    """

    crossing: Crossing
    """What a micro-batch puts across, over the whole run."""
    name: str = "cut"
    codecs: Pair = RAW_PAIR
    num_warmup_steps: int = 0
    """Steps in which hidden states cross raw, for a bottleneck to learn from."""
    guard_every: int = 0
    guard_cosine: float = LEAST_COSINE
    bounds: Bounds = field(default_factory=Bounds)
    is_free: bool = False
    """Whether the job leaves the codec of a direction open."""
    bandwidths_bps: tuple[float, float] | None = None
    """The job's figures of the line, down and up."""
    least_lossy: Pair | None = None
    """What was planned where money counts: less lossy codecs would cost more traffic."""
    shares_ids: bool = True
    """Whether token ids may cross, so that codecs may have anchors by them."""

    @property
    def levels(self) -> tuple[CodecLevel, ...]:
        """The codec levels to choose from."""
        return codec_levels(self.crossing.width, shares_ids=self.shares_ids)

    def allows(self, pair: Pair) -> bool:
        """Whether a peer may ask for these codecs: the job's own, raw, or a level of this cut."""
        forward = {self.codecs.forward, RAW_PAIR.forward, *(one.forward for one in self.levels)}
        backward = {self.codecs.backward, RAW_PAIR.backward, *(one.backward for one in self.levels)}
        return pair.forward in forward and pair.backward in backward


@dataclass(frozen=True, slots=True, kw_only=True)
class CutState(Facts):
    """The codecs of a cut, since when, and the fewest bytes that the guard allows of a message each way."""

    codecs: Texts
    since_step: Count = 0
    least_forward_bytes: Count = 0
    least_backward_bytes: Count = 0

    @property
    def pair(self) -> Pair:
        """The codecs."""
        return read_pair(self.codecs)


def guarded(
    cut: Cut, pair: Pair, cosine: float, *, steps_in_force: int, of_gradient: bool = False
) -> tuple[Pair, str] | None:
    """The next less lossy codecs, and why, where a measured message has changed too much; else None.

    A cosine of NaN says that nothing was measured. The cosine of gradients that are projected as their
    activations were says nothing about their code.
    """
    is_young = pair.subspace is not None and steps_in_force < _YOUNG_STEPS
    if math.isnan(cosine) or cosine >= cut.guard_cosine or is_young:
        return None
    if of_gradient and pair.projects_gradients:
        return None
    other = less_lossy(pair, cut.crossing, levels=cut.levels, of_gradient=of_gradient)
    if other is None:
        return None
    what, old, new = (
        ("gradients", pair.backward, other.backward)
        if of_gradient
        else ("activations", pair.forward, other.forward)
    )
    return other, (
        f"{what} {new} instead of {old}: the cosine between what was sent and what arrives "
        f"fell to {cosine:.4f}, below the link's guard_cosine of {cut.guard_cosine:g}"
    )


class _Steered:
    """One cut with its codecs and the latest figures of it."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.state = CutState(codecs=texts_of(cut.codecs))
        self.figures: deque[Figures] = deque(maxlen=_MOST_STEPS)
        self.notes: list[str] = []

    def measure(self, hop: Hop, interval_s: float) -> None:
        self.figures.append(_figures(self.cut, self.state.pair, hop, interval_s))
        while _has_changed(self.figures):
            self.figures.popleft()

    def guard(self, cosines: Cosines, step: int) -> None:
        measured = self.state.pair
        for of_gradient, cosine in ((False, cosines.forward), (True, cosines.backward)):
            pair = self.state.pair
            if of_gradient and (measured.projects_gradients or measured.backward != pair.backward):
                # What was measured says nothing about the code of gradients, or about the one they have now.
                continue
            steps_in_force = step - self.state.since_step
            found = guarded(self.cut, pair, cosine, steps_in_force=steps_in_force, of_gradient=of_gradient)
            if found is not None:
                other, reason = found
                key = "least_backward_bytes" if of_gradient else "least_forward_bytes"
                num_bytes = Pair.backward_bytes if of_gradient else Pair.forward_bytes
                self._change(other, step, reason, **{key: num_bytes(other, self.cut.crossing)})

    def choose(self, step: int) -> None:
        crossing = _from_now(self.cut.crossing, step + 1)
        if not self.cut.is_free or len(self.figures) < _NUM_STEPS or crossing is None:
            return
        choice = choose(
            crossing,
            _median(self.figures),
            levels=self.cut.levels,
            bounds=_bounds(self.cut, self.state),
            current=self.state.pair,
            age=step + 1 - max(self.state.since_step, self.cut.num_warmup_steps),
        )
        if choice.pair != self.state.pair:
            self._change(choice.pair, step, choice.reason)

    def _change(self, pair: Pair, step: int, reason: str, **least_bytes: int) -> None:
        self.state = replace(self.state, codecs=texts_of(pair), since_step=step + 1, **least_bytes)
        self.figures.clear()
        # People count steps from 1, and it is the next one that has them.
        self.notes.append(f"link {self.cut.name}, from step {step + 2} on: {reason}")


class Steering:
    """Goes through the cuts at the end of each step and changes codecs where that pays."""

    def __init__(self, cuts: Sequence[Cut], *, num_microbatches: int) -> None:
        self.notes: list[str] = []
        """What was changed and why, for the scheduler to take and tell."""
        self._num_microbatches = num_microbatches
        self._num_steps = 0
        self._cuts = [_Steered(one) for one in cuts]

    def __call__(self, tally: Tally) -> tuple[Pair, ...]:
        """The codecs of all cuts from the next step on."""
        self._num_steps += 1
        interval_s = max(tally.busy_s) / self._num_microbatches
        measured = zip(self._cuts, tally.hops, tally.cosines, tally.element_bytes, strict=True)
        for one, hop, cosines, element_bytes in measured:
            if tally.step >= one.cut.num_warmup_steps:
                one.cut = _sized(one.cut, element_bytes)
                if self._num_steps > _NUM_WARM_UP_STEPS:
                    one.measure(hop, interval_s)
                one.guard(cosines, tally.step)
                one.choose(tally.step)
            self.notes += one.notes
            one.notes.clear()
        return tuple(one.state.pair for one in self._cuts)

    @property
    def states(self) -> tuple[CutState, ...]:
        """The present codecs of all cuts, for a checkpoint."""
        return tuple(one.state for one in self._cuts)

    def restore(self, saved: Sequence[CutState], *, is_same: Sequence[bool], step: int) -> None:
        """Continue with the codecs of a checkpoint, but for cuts to which the job gives others now."""
        for one, before, continues in zip(self._cuts, saved, is_same, strict=True):
            if continues:
                one.state = before
                continue
            one.state = CutState(codecs=texts_of(one.cut.codecs), since_step=step)
            told = f"codec {_both(before.codecs)}, now {_both(one.state.codecs)}"
            self.notes.append(f"link {one.cut.name}: {told}")


def _bounds(cut: Cut, state: CutState) -> Bounds:
    """What the job allows, less what the guard has ruled out."""
    job = cut.bounds
    bounds = replace(
        job,
        forward=None if job.forward is None else state.pair.forward,
        backward=None if job.backward is None else state.pair.backward,
        least_forward_bytes=state.least_forward_bytes,
        least_backward_bytes=state.least_backward_bytes,
    )
    if cut.least_lossy is None:
        return bounds
    return replace(
        bounds,
        most_forward_bytes=max(bounds.least_forward_bytes, cut.least_lossy.forward_bytes(cut.crossing)),
        most_backward_bytes=max(bounds.least_backward_bytes, cut.least_lossy.backward_bytes(cut.crossing)),
    )


def _sized(cut: Cut, element_bytes: int) -> Cut:
    """A cut whose raw elements have the size that was measured, if any was."""
    known = element_bytes or cut.crossing.element_bytes
    return replace(cut, crossing=replace(cut.crossing, element_bytes=known))


def _from_now(crossing: Crossing, step: int) -> Crossing | None:
    """A crossing with the steps that are left of the run, None where there are none."""
    if crossing.num_steps is None:
        return crossing
    left = crossing.num_steps - step
    return replace(crossing, num_steps=left) if left > 0 else None


def _figures(cut: Cut, pair: Pair, hop: Hop, interval_s: float) -> Figures:
    """The line's bandwidths from the time of a message on it; the job's own tell how both ways compare.

    The job's stand where the message is too short to be measured, as by them it should be.
    """
    down_bps, up_bps = cut.bandwidths_bps or (1.0, 1.0)
    expected_s = _mean_s(cut.crossing, pair, down_bps, up_bps)
    if cut.bandwidths_bps is None or max(hop.forward_s, expected_s) >= _LEAST_ON_LINE_S:
        scale = expected_s / max(hop.forward_s, _LEAST_MEASURED_S)
        down_bps, up_bps = down_bps * scale, up_bps * scale
    return Figures(interval_s=interval_s, down_bps=down_bps, up_bps=up_bps)


def _mean_s(crossing: Crossing, pair: Pair, down_bps: float, up_bps: float) -> float:
    """The mean time on the line of an activation and its gradient, as a hop has it."""
    forward_s = 8 * pair.forward_bytes(crossing) / down_bps
    backward_s = 8 * pair.backward_bytes(crossing) / up_bps
    return (forward_s + backward_s) / 2 if crossing.has_gradient else forward_s


def _has_changed(figures: Sequence[Figures]) -> bool:
    """Whether the latest steps tell of another line, or of another pace, than those before them."""
    before, latest = list(figures)[:-_NUM_STEPS], list(figures)[-_NUM_STEPS:]
    if not before:
        return False
    old, new = _median(before), _median(latest)
    return any(
        abs(now - then) > _OTHER_LINE * then
        for then, now in ((old.interval_s, new.interval_s), (old.down_bps, new.down_bps))
    )


def _median(figures: Sequence[Figures]) -> Figures:
    return Figures(
        interval_s=shorten(statistics.median(one.interval_s for one in figures)),
        down_bps=statistics.median(one.down_bps for one in figures),
        up_bps=statistics.median(one.up_bps for one in figures),
    )


def _both(texts: Texts) -> str:
    forward, backward = texts
    return forward if forward == backward else f"{forward} and {backward}"
