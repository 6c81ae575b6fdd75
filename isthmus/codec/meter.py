"""How much coding changes, measured by the sender, and what to do when it changes too much."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import Key
from isthmus.plan.ladder import Crossing, Pair, Rung, widen

LEAST_COSINE: Final = 0.98

# A basis is renewed after 1, 2, 4 and 8 steps: until then a poor one is on its way out.
_YOUNG_STEPS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How far what arrives is from what was sent: |sent − arrives| / |sent|, and the cosine between them."""

    relative_error: float
    cosine: float


def measure(sent_ND: Tensor, arrives_ND: Tensor) -> Fidelity:
    """Compare two matrices over the rows that were finite when sent; equal where there are none."""
    sent, arrives = sent_ND.double(), arrives_ND.double()
    is_finite = sent.isfinite().all(dim=1, keepdim=True)
    sent, arrives = torch.where(is_finite, sent, 0), torch.where(is_finite, arrives, 0)
    sums = torch.stack([one.sum() for one in (sent**2, arrives**2, sent * arrives, (sent - arrives) ** 2)])
    # One transfer, so that a device is waited for once.
    sent_sum, arrives_sum, product, lost = sums.tolist()
    if lost == 0:
        return Fidelity(relative_error=0.0, cosine=1.0)
    if not math.isfinite(lost):
        return Fidelity(relative_error=math.inf, cosine=0.0)
    norms = math.sqrt(sent_sum) * math.sqrt(arrives_sum)
    return Fidelity(
        relative_error=math.sqrt(lost / sent_sum) if sent_sum else math.inf,
        cosine=product / norms if norms else 0.0,
    )


class Meter:
    """Keeps the worst of the messages that it measured; where every so many-th is, in one direction of a cut.

    It is used where messages are coded, beside the computation.
    """

    def __init__(self, *, every: int, num_microbatches: int) -> None:
        self._every = every
        self._num_microbatches = num_microbatches
        self._worst: Fidelity | None = None

    def is_due(self, key: Key) -> bool:
        """Whether to measure this message: its own number says so, so that a resumed run does the same."""
        return self._every > 0 and (key.step * self._num_microbatches + key.microbatch) % self._every == 0

    def note(self, sent_ND: Tensor, arrives_ND: Tensor) -> Fidelity:
        """Measure a message."""
        found = measure(sent_ND, arrives_ND)
        if self._worst is None or found.cosine < self._worst.cosine:
            self._worst = found
        return found

    def take(self) -> Fidelity | None:
        """The worst message since this was last asked, None if none was measured."""
        worst, self._worst = self._worst, None
        return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Widening:
    """The codecs to change to, and why."""

    pair: Pair
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Asks for the next milder codec where a measured message has changed too much."""

    least_cosine: float = LEAST_COSINE

    def judge(
        self,
        cosine: float,
        pair: Pair,
        crossing: Crossing,
        *,
        rungs: Sequence[Rung],
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
