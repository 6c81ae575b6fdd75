"""Which codecs the cuts use from the next step on: decided at the first stage, from what all stages measured.

Every member gets the decision with the verdict on a step and writes it into its messages, so both ends of a
cut change at the same step.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from isthmus.plan.codecs import (
    RAW_PAIR,
    Bounds,
    CodecLevel,
    Crossing,
    Figures,
    Pair,
    codec_levels,
    read_pair,
    reconsider,
    texts_of,
    widen,
)
from isthmus.plan.end_of_step import Cosines, Count, Tally, Texts
from isthmus.plan.scenario import Hop
from isthmus.plan.types import Facts
from isthmus.units import shorten

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

    @property
    def levels(self) -> tuple[CodecLevel, ...]:
        """The codec levels to choose from."""
        return codec_levels(self.crossing.width, shares_ids=True)

    def allows(self, pair: Pair) -> bool:
        """Whether a peer may ask for these codecs: the job's own, raw, or a level of this cut."""
        forward = {self.codecs.forward, RAW_PAIR.forward, *(one.forward for one in self.levels)}
        backward = {self.codecs.backward, RAW_PAIR.backward, *(one.backward for one in self.levels)}
        return pair.forward in forward and pair.backward in backward


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCodecs(Facts):
    """A `Standing` as a checkpoint holds it."""

    codecs: Texts
    since_step: Count = 0
    least_forward_bytes: Count = 0
    least_backward_bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The codecs of a cut, since when, and the fewest bytes that the guard allows of a message each way."""

    pair: Pair
    since_step: int = 0
    least_forward_bytes: int = 0
    least_backward_bytes: int = 0

    def saved(self) -> SavedCodecs:
        """The same as facts."""
        return SavedCodecs(
            codecs=texts_of(self.pair),
            since_step=self.since_step,
            least_forward_bytes=self.least_forward_bytes,
            least_backward_bytes=self.least_backward_bytes,
        )


def restored(saved: SavedCodecs) -> Standing:
    """The standing that `Standing.saved` gave."""
    return Standing(
        pair=read_pair(saved.codecs),
        since_step=saved.since_step,
        least_forward_bytes=saved.least_forward_bytes,
        least_backward_bytes=saved.least_backward_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Widening:
    """The codecs to change to, and why."""

    pair: Pair
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Asks for the next less lossy codec where a measured message has changed too much."""

    least_cosine: float = LEAST_COSINE

    def judge(
        self,
        cosine: float,
        pair: Pair,
        crossing: Crossing,
        *,
        rungs: Sequence[CodecLevel],
        steps_in_force: int,
        of_gradient: bool = False,
    ) -> Widening | None:
        """What to change to, None to go on; a cosine of NaN says that nothing was measured.

        The cosine of gradients that are projected as their activations were says nothing about their code.
        """
        is_young = pair.has_subspace and steps_in_force < _YOUNG_STEPS
        if math.isnan(cosine) or cosine >= self.least_cosine or is_young:
            return None
        if of_gradient and pair.projects_gradients:
            return None
        wider = widen(pair, crossing, rungs=rungs, of_gradient=of_gradient)
        if wider is None:
            return None
        what, old, new = (
            ("gradients", pair.backward, wider.backward)
            if of_gradient
            else ("activations", pair.forward, wider.forward)
        )
        return Widening(
            pair=wider,
            reason=f"{what} {new} instead of {old}: the cosine between what was sent and what arrives "
            f"fell to {cosine:.4f}, below the link's guard_cosine of {self.least_cosine:g}",
        )


@dataclass(slots=True, kw_only=True)
class _Steered:
    """One cut, and the latest figures of it."""

    cut: Cut
    standing: Standing
    figures: deque[Figures] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))


class Steering:
    """Goes through the cuts at the end of each step and changes codecs where that pays."""

    def __init__(self, cuts: Sequence[Cut], *, num_microbatches: int) -> None:
        self.notes: list[str] = []
        """What was changed and why, for the scheduler to take and tell."""
        self._num_microbatches = num_microbatches
        self._num_steps = 0
        self._cuts = [_Steered(cut=one, standing=Standing(pair=one.codecs)) for one in cuts]

    def __call__(self, tally: Tally) -> tuple[Pair, ...]:
        """The codecs of all cuts from the next step on."""
        self._num_steps += 1
        interval_s = max(tally.busy_s) / self._num_microbatches
        measured = zip(self._cuts, tally.hops, tally.cosines, tally.element_bytes, strict=True)
        for one, hop, cosines, element_bytes in measured:
            if tally.step >= one.cut.num_warmup_steps:
                one.cut = _sized(one.cut, element_bytes)
                self._measure(one, hop, interval_s)
                self._guard(one, cosines, tally.step)
                self._choose(one, tally.step)
        return tuple(one.standing.pair for one in self._cuts)

    @property
    def standings(self) -> tuple[Standing, ...]:
        """The present codecs of all cuts."""
        return tuple(one.standing for one in self._cuts)

    def restore(self, saved: Sequence[SavedCodecs], *, is_same: Sequence[bool], step: int) -> None:
        """Continue with the codecs of a checkpoint, but for cuts to which the job gives others now."""
        for one, before, continues in zip(self._cuts, saved, is_same, strict=True):
            if continues:
                one.standing = restored(before)
                continue
            now = texts_of(one.cut.codecs)
            one.standing = Standing(pair=one.cut.codecs, since_step=step)
            self.notes.append(f"link {one.cut.name}: codec {_both(before.codecs)}, now {_both(now)}")

    def _guard(self, one: _Steered, cosines: Cosines, step: int) -> None:
        measured = one.standing.pair
        for of_gradient, cosine in ((False, cosines.forward), (True, cosines.backward)):
            cut, standing = one.cut, one.standing
            if of_gradient and (measured.projects_gradients or measured.backward != standing.pair.backward):
                # What was measured says nothing about the code of gradients, or about the one they have now.
                continue
            widening = Guard(least_cosine=cut.guard_cosine).judge(
                cosine,
                standing.pair,
                cut.crossing,
                rungs=cut.levels,
                steps_in_force=step - standing.since_step,
                of_gradient=of_gradient,
            )
            if widening is not None:
                one.standing = _widened(standing, widening, cut.crossing, of_gradient=of_gradient)
                self._change(one, widening.pair, step, widening.reason)

    def _measure(self, one: _Steered, hop: Hop, interval_s: float) -> None:
        if self._num_steps > _NUM_WARM_UP_STEPS:
            one.figures.append(_figures(one.cut, one.standing.pair, hop, interval_s))
            while _has_changed(one.figures):
                one.figures.popleft()

    def _choose(self, one: _Steered, step: int) -> None:
        cut, standing = one.cut, one.standing
        crossing = _from_now(cut.crossing, step + 1)
        if not cut.is_free or len(one.figures) < _NUM_STEPS or crossing is None:
            return
        choice = reconsider(
            standing.pair,
            crossing,
            _median(one.figures),
            rungs=cut.levels,
            bounds=_bounds(cut, standing),
            age=step + 1 - max(standing.since_step, cut.num_warmup_steps),
        )
        if choice is not None and choice.pair != standing.pair:
            self._change(one, choice.pair, step, choice.reason)

    def _change(self, one: _Steered, pair: Pair, step: int, reason: str) -> None:
        one.standing = replace(one.standing, pair=pair, since_step=step + 1)
        one.figures.clear()
        # People count steps from 1, and it is the next one that has them.
        self.notes.append(f"link {one.cut.name}, from step {step + 2} on: {reason}")


def _bounds(cut: Cut, standing: Standing) -> Bounds:
    """What the job allows, less what the guard has ruled out: a codec of the job that it has widened too."""
    job = cut.bounds
    bounds = replace(
        job,
        forward=None if job.forward is None else standing.pair.forward,
        backward=None if job.backward is None else standing.pair.backward,
        least_forward_bytes=standing.least_forward_bytes,
        least_backward_bytes=standing.least_backward_bytes,
    )
    if cut.least_lossy is None:
        return bounds
    return replace(
        bounds,
        most_forward_bytes=max(bounds.least_forward_bytes, cut.least_lossy.forward_bytes(cut.crossing)),
        most_backward_bytes=max(bounds.least_backward_bytes, cut.least_lossy.backward_bytes(cut.crossing)),
    )


def _sized(cut: Cut, element_bytes: int) -> Cut:
    """With raw numbers of the size that has crossed, if any have."""
    known = element_bytes or cut.crossing.element_bytes
    return replace(cut, crossing=replace(cut.crossing, element_bytes=known))


def _from_now(crossing: Crossing, step: int) -> Crossing | None:
    """With the steps that are left of the run, None where there are none."""
    whole = crossing.stretch
    if whole is None:
        return crossing
    left = whole.num_steps - step
    return replace(crossing, stretch=replace(whole, num_steps=left)) if left > 0 else None


def _widened(standing: Standing, widening: Widening, crossing: Crossing, *, of_gradient: bool) -> Standing:
    if of_gradient:
        return replace(standing, least_backward_bytes=widening.pair.backward_bytes(crossing))
    return replace(standing, least_forward_bytes=widening.pair.forward_bytes(crossing))


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
    """Of an activation and its gradient on the line, as a hop has it."""
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
