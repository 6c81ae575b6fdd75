"""Which codecs the cuts have from the next step on: decided by the first stage, from what all have measured.

Every stage gets the decision with the verdict on a step, so both ends of a cut change at the same step.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from isthmus.codec.meter import Guard, Widening
from isthmus.plan.codec_choice import Bounds, Figures, reconsider
from isthmus.plan.ladder import Crossing, Pair, Rung, ladder
from isthmus.plan.window import Hop
from isthmus.train.crossing.cut import Cut
from isthmus.train.crossing.words import Cosines, Tally
from isthmus.units import shorten

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
class Terms:
    """What codecs of one cut are chosen by; `is_free` where the job leaves a direction to us.

    The crossing's stretch is the whole run. `bandwidths_bps` are the job's, down and up.
    """

    cut: Cut
    crossing: Crossing
    bounds: Bounds
    is_free: bool
    bandwidths_bps: tuple[float, float] | None = None
    mildest: Pair | None = None
    """What was planned where money counts: codecs get no milder, or traffic would cost more."""

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The ladder to choose from."""
        return ladder(self.crossing.width, shares_ids=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The codecs of a cut, since when, and the fewest bytes that the guard allows of a message each way."""

    pair: Pair
    since_step: int = 0
    least_forward_bytes: int = 0
    least_backward_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Steered:
    """One cut, and the latest figures of it."""

    terms: Terms
    standing: Standing
    figures: deque[Figures] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))


class Steering:
    """Goes through the cuts at the end of each step; tells what it changes, and why."""

    def __init__(self, cuts: Sequence[Terms], *, num_microbatches: int, note: Callable[[str], None]) -> None:
        self._num_microbatches = num_microbatches
        self._note = note
        self._num_steps = 0
        self._cuts = [_Steered(terms=one, standing=Standing(pair=one.cut.codecs)) for one in cuts]

    def __call__(self, tally: Tally) -> tuple[Pair, ...]:
        """The codecs of all cuts from the next step on."""
        self._num_steps += 1
        interval_s = max(tally.busy_s) / self._num_microbatches
        measured = zip(self._cuts, tally.hops, tally.cosines, tally.element_bytes, strict=True)
        for one, hop, cosines, element_bytes in measured:
            if tally.step >= one.terms.cut.num_warmup_steps:
                one.terms = _sized(one.terms, element_bytes)
                self._measure(one, hop, interval_s)
                self._guard(one, cosines, tally.step)
                self._choose(one, tally.step)
        return tuple(one.standing.pair for one in self._cuts)

    @property
    def standings(self) -> tuple[Standing, ...]:
        """How all cuts stand, for the checkpoint."""
        return tuple(one.standing for one in self._cuts)

    def restore(self, standings: Sequence[Standing]) -> None:
        """Go on as cuts stood."""
        for one, standing in zip(self._cuts, standings, strict=True):
            one.standing = standing

    def _guard(self, one: _Steered, cosines: Cosines, step: int) -> None:
        measured = one.standing.pair
        for of_gradient, cosine in ((False, cosines.forward), (True, cosines.backward)):
            terms, standing = one.terms, one.standing
            if of_gradient and (measured.projects_gradients or measured.backward != standing.pair.backward):
                # What was measured says nothing about the code of gradients, or about the one they have now.
                continue
            widening = Guard(least_cosine=terms.cut.guard_cosine).judge(
                cosine,
                standing.pair,
                terms.crossing,
                rungs=terms.rungs,
                steps_in_force=step - standing.since_step,
                of_gradient=of_gradient,
            )
            if widening is not None:
                one.standing = _widened(standing, widening, terms.crossing, of_gradient=of_gradient)
                self._change(one, widening.pair, step, widening.reason)

    def _measure(self, one: _Steered, hop: Hop, interval_s: float) -> None:
        if self._num_steps > _NUM_WARM_UP_STEPS:
            one.figures.append(_figures(one.terms, one.standing.pair, hop, interval_s))
            while _has_changed(one.figures):
                one.figures.popleft()

    def _choose(self, one: _Steered, step: int) -> None:
        terms, standing = one.terms, one.standing
        crossing = _from_now(terms.crossing, step + 1)
        if not terms.is_free or len(one.figures) < _NUM_STEPS or crossing is None:
            return
        choice = reconsider(
            standing.pair,
            crossing,
            _median(one.figures),
            rungs=terms.rungs,
            bounds=_bounds(terms, standing),
            age=step + 1 - max(standing.since_step, terms.cut.num_warmup_steps),
        )
        if choice is not None and choice.pair != standing.pair:
            self._change(one, choice.pair, step, choice.reason)

    def _change(self, one: _Steered, pair: Pair, step: int, reason: str) -> None:
        one.standing = replace(one.standing, pair=pair, since_step=step + 1)
        one.figures.clear()
        # People count steps from 1, and it is the next one that has them.
        self._note(f"link {one.terms.cut.name}, from step {step + 2} on: {reason}")


def _bounds(terms: Terms, standing: Standing) -> Bounds:
    """What the job allows, less what the guard has ruled out: a codec of the job that it has widened too."""
    job = terms.bounds
    bounds = replace(
        job,
        forward=None if job.forward is None else standing.pair.forward,
        backward=None if job.backward is None else standing.pair.backward,
        least_forward_bytes=standing.least_forward_bytes,
        least_backward_bytes=standing.least_backward_bytes,
    )
    if terms.mildest is None:
        return bounds
    return replace(
        bounds,
        most_forward_bytes=max(bounds.least_forward_bytes, terms.mildest.forward_bytes(terms.crossing)),
        most_backward_bytes=max(bounds.least_backward_bytes, terms.mildest.backward_bytes(terms.crossing)),
    )


def _sized(terms: Terms, element_bytes: int) -> Terms:
    """With raw numbers of the size that has crossed, if any have."""
    known = element_bytes or terms.crossing.element_bytes
    return replace(terms, crossing=replace(terms.crossing, element_bytes=known))


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


def _figures(terms: Terms, pair: Pair, hop: Hop, interval_s: float) -> Figures:
    """The line's bandwidths from the time of a message on it; the job's own tell how both ways compare.

    The job's stand where the message is too short to be measured, as by them it should be.
    """
    down_bps, up_bps = terms.bandwidths_bps or (1.0, 1.0)
    expected_s = _mean_s(terms.crossing, pair, down_bps, up_bps)
    if terms.bandwidths_bps is None or max(hop.forward_s, expected_s) >= _LEAST_ON_LINE_S:
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
