"""How much coding changes, measured by the sender."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.codec.base import Key


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


class ErrorMeter:
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
