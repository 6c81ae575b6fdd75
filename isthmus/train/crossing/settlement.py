"""The end of a step over all stages, without a round trip that anyone waits for.

When a stage has run its last backward it sends a tally up: the norms of its own gradients and of all behind
it, beside its last gradient. The first stage has them all when its own last backward ends, and sends its
verdict down at once. It overtakes the next step's first activation, without which no later stage could go on
anyhow; so every stage knows the norm before it updates its weights, and none has waited for it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from isthmus.errors import IsthmusError
from isthmus.plan.ladder import Pair
from isthmus.plan.pipeline import Policy
from isthmus.plan.rank_windows import Measured, bare_scenario, next_windows
from isthmus.plan.scenario import Caps
from isthmus.plan.types import ScheduleError
from isthmus.plan.window import Hop
from isthmus.train.crossing.courier import Courier, Mailbox
from isthmus.train.crossing.words import (
    TALLY,
    VERDICT,
    Cosines,
    Tally,
    Verdict,
    pack_tally,
    pack_verdict,
    unpack_tally,
    verdict_from_words,
    verdict_to_words,
)
from isthmus.train.optimize.optimizer import total_norm
from isthmus.train.ranks.world import Alone, World
from isthmus.wan.outbox import Priority
from isthmus.wan.packet import Packet


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the first stage decides by."""

    num_microbatches: int
    max_in_flight: Caps
    policy: Policy = Policy.WAN_ONE_F_ONE_B
    should_save: Callable[[int], bool] = field(default=lambda _: False)
    steer: Callable[[Tally], tuple[Pair, ...]] = field(default=lambda _: ())
    """The codecs of all cuts from the next step on."""
    num_ranks: tuple[int, ...] = ()
    """Of each stage; one each where nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a stage has measured of its two cuts in a step; None and NaN where there was nothing."""

    gradient_travel_s: float | None = None
    """The shortest way of a gradient to this stage."""
    coding_s: float = 0.0
    """Of an activation that left for the stage behind, and of its gradient that came, at this end."""
    element_bytes: int = 0
    """Of a number that left for the stage behind, before it was coded; 0 where none has."""
    activation_cosine: float = math.nan
    """The lowest of what left for the stage behind."""
    gradient_cosine: Callable[[], float] = field(default=lambda: math.nan)
    """The lowest of what left for the stage before."""


class Settlement:
    """One stage's part in it; the first stage has no one above, the last no one behind.

    The leader of a cloud gathers what its ranks have to say, speaks for them, and spreads the verdict.
    """

    def __init__(self, *, terms: Terms, world: World | None = None) -> None:
        self._terms = terms
        self._world = world or Alone()
        self._tallies: Mailbox[Tally] = Mailbox()
        self._verdicts: Mailbox[Verdict] = Mailbox()

    def on_tally(self, packet: Packet) -> None:
        """Take in the tally of the stage behind."""
        self._tallies.put(unpack_tally(packet))

    def on_verdict(self, verdict: Verdict) -> None:
        """Take in the verdict of the first stage."""
        self._verdicts.put(verdict)

    def fail(self, error: BaseException) -> None:
        """Let whoever waits here know that nothing more will come."""
        self._tallies.fail(error)
        self._verdicts.fail(error)

    def settle(
        self, own: Tally, *, seen: Seen, up: Courier | None, down: Courier | None
    ) -> tuple[Tally, Verdict]:
        """Give the tally of this stage and all behind it, and the verdict on the step.

        At ranks that are not the leader, who have no courier for words, the tally is their own.
        """
        found = self._world.gather(_words(own, seen)) if self._world.seat.num_ranks > 1 else []
        if found is None:
            return own, verdict_from_words(self._world.spread(None))
        if found:
            own, seen = _together(own, found)
        tally, verdict = self._settle(own, seen, up, down)
        if found:
            self._world.spread(verdict_to_words(verdict))
        return tally, verdict

    def _settle(
        self, own: Tally, seen: Seen, up: Courier | None, down: Courier | None
    ) -> tuple[Tally, Verdict]:
        tally = own if down is None else self._join(own, seen, down.rtt_s)
        if up is None:
            verdict = self._judge(tally)
        else:
            # Made on the courier's thread, by when the last gradient is coded and so measured.
            up.send(
                TALLY,
                lambda: pack_tally(replace(tally, gradient_cosine=seen.gradient_cosine())),
                priority=Priority.URGENT,
            )
            verdict = self._verdicts.take()
            _check_step(verdict.step, own.step)
        if down is not None:
            down.send(VERDICT, lambda: pack_verdict(verdict), priority=Priority.URGENT)
        return tally, verdict

    def _join(self, own: Tally, seen: Seen, rtt_s: float) -> Tally:
        behind = self._tallies.take()
        _check_step(behind.step, own.step)
        hop = _hop(behind.travel_s, seen.gradient_travel_s, rtt_s)
        hop = replace(hop, coding_s=seen.coding_s + behind.coding_s)
        here = Cosines(forward=seen.activation_cosine, backward=behind.gradient_cosine)
        return replace(
            own,
            loss_sum=behind.loss_sum,
            squared_norms=own.squared_norms + behind.squared_norms,
            busy_s=own.busy_s + behind.busy_s,
            hops=(hop, *behind.hops),
            cosines=(here, *behind.cosines),
            element_bytes=(seen.element_bytes, *behind.element_bytes),
        )

    def _judge(self, tally: Tally) -> Verdict:
        norm = total_norm(tally.squared_norms)
        if not math.isfinite(norm) or not math.isfinite(tally.loss_sum):
            raise IsthmusError(
                f"the loss or its gradient is not finite any more at step {tally.step + 1}",
                hint="lower train.learning_rate; the weights are as the last checkpoint has them",
            )
        return Verdict(
            step=tally.step,
            norm=norm,
            windows=self._windows(tally),
            save=self._terms.should_save(tally.step),
            codecs=self._terms.steer(tally),
        )

    def _windows(self, tally: Tally) -> tuple[int, ...]:
        terms = self._terms
        num_ranks = terms.num_ranks or (1,) * len(tally.busy_s)
        busy = zip(tally.busy_s, num_ranks, strict=True)
        measured = Measured(
            pass_s=tuple(number * busy_s / terms.num_microbatches for busy_s, number in busy), hops=tally.hops
        )
        scenario = bare_scenario(num_ranks, num_microbatches=terms.num_microbatches, policy=terms.policy)
        return next_windows(scenario, measured, max_in_flight=terms.max_in_flight)


def _hop(forward_travel_s: float, backward_travel_s: float | None, rtt_s: float) -> Hop:
    """Travel less latency is time on the line; errors of the clocks cancel in the round trip."""
    latency_s = rtt_s / 2
    # To frozen layers nothing comes back.
    travel_s = forward_travel_s if backward_travel_s is None else (forward_travel_s + backward_travel_s) / 2
    on_line_s = max(0.0, travel_s - latency_s)
    return Hop(forward_s=on_line_s, backward_s=on_line_s, latency_s=latency_s)


def _words(own: Tally, seen: Seen) -> dict[str, float | None]:
    """What the leader must know of one rank."""
    return {
        "loss_sum": own.loss_sum,
        "busy_s": own.busy_s[0],
        "travel_s": own.travel_s or None,
        "gradient_travel_s": seen.gradient_travel_s,
        "up_coding_s": own.coding_s,
        "down_coding_s": seen.coding_s,
        "element_bytes": seen.element_bytes,
        "activation_cosine": seen.activation_cosine,
        "gradient_cosine": seen.gradient_cosine(),
    }


def _together(own: Tally, found: Sequence[Mapping[str, float | None]]) -> tuple[Tally, Seen]:
    """The tally of a cloud: losses add up, ranks work side by side, and the shortest and worst counts."""

    def known(key: str) -> list[float]:
        return [value for one in found if (value := one[key]) is not None and not math.isnan(value)]

    tally = replace(
        own,
        loss_sum=math.fsum(float(one["loss_sum"] or 0.0) for one in found),
        busy_s=(math.fsum(known("busy_s")) / len(found),),
        travel_s=min(known("travel_s"), default=0.0),
        coding_s=max(known("up_coding_s")),
    )
    lowest = min(known("gradient_cosine"), default=math.nan)
    return tally, Seen(
        gradient_travel_s=min(known("gradient_travel_s"), default=None),
        coding_s=max(known("down_coding_s")),
        element_bytes=int(max(known("element_bytes"))),
        activation_cosine=min(known("activation_cosine"), default=math.nan),
        gradient_cosine=lambda: lowest,
    )


def _check_step(found: int, expected: int) -> None:
    if found != expected:
        raise ScheduleError(f"word of step {found} has come at the end of step {expected}")
