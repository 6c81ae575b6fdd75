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
    choose,
    codec_levels,
    less_lossy,
    read_pair,
    texts_of,
)
from isthmus.plan.end_of_step import Cosines, Tally, Texts
from isthmus.plan.scenario import Hop
from isthmus.plan.types import Count, Facts
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
