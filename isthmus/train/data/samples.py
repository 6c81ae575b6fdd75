"""Samples: what one sequence of a micro-batch is made from, by its number and the epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.model.heads import IGNORED
from isthmus.train.data.order import Pick, draw_keys, mix

Integers = NDArray[np.integer[Any]]

_MASKED_SHARE: Final = 0.15
_TO_MASK_SHARE: Final = 0.8
_TO_RANDOM_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence without padding, and its labels: one a token, or those of the whole sequence."""

    ids: Integers
    labels: Integers
    token_types: Integers | None = None


class Samples(Protocol):
    """Any number of samples that can be read in any order."""

    def __len__(self) -> int: ...

    def read(self, pick: Pick) -> Sample:
        """The sample of that number, as it is in that epoch."""
        ...


@dataclass(frozen=True, slots=True)
class ListedSamples:
    """Samples that are the same in every epoch."""

    samples: Sequence[Sample]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, pick: Pick) -> Sample:
        """The sample of that number."""
        return self.samples[pick.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples:
    """All documents as one row of tokens, cut into sequences; every token is a label too."""

    tokens: Integers
    sequence_length: int
    keeps_rest: bool
    """Whether the tokens behind the last whole sequence are one more, shorter, sequence."""

    def __len__(self) -> int:
        whole, rest = divmod(len(self.tokens), self.sequence_length)
        # A single token predicts nothing.
        return whole + (self.keeps_rest and rest > 1)

    def read(self, pick: Pick) -> Sample:
        """The sequence of that number."""
        start = pick.index * self.sequence_length
        ids = self.tokens[start : start + self.sequence_length]
        return Sample(ids=ids, labels=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSamples:
    """Samples for a masked language model: which tokens are hidden depends on seed, epoch and number.

    Of the tokens that are to be found, 15 %, most become the mask, a tenth another token, the rest stay.
    """

    samples: Samples
    seed: int
    mask_id: int
    special_ids: tuple[int, ...]
    num_tokens: int

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, pick: Pick) -> Sample:
        """The sample of that number, masked as in that epoch."""
        sample = self.samples.read(pick)
        ids = sample.ids.astype(np.int64)
        choice, change, other = self._draws(pick, len(ids))
        choice[np.isin(ids, self.special_ids)] = np.inf
        # The least is always chosen, so that no sample is without a label.
        is_hidden = (choice < max(_MASKED_SHARE, np.nextafter(choice.min(), 2))) & np.isfinite(choice)
        labels = np.where(is_hidden, ids, IGNORED)
        becomes_mask = is_hidden & (change < _TO_MASK_SHARE)
        becomes_other = is_hidden & ~becomes_mask & (change < _TO_MASK_SHARE + _TO_RANDOM_SHARE)
        ids[becomes_mask] = self.mask_id
        ids[becomes_other] = (other * self.num_tokens).astype(np.int64)[becomes_other]
        return Sample(ids=ids, labels=labels, token_types=sample.token_types)

    def _draws(self, pick: Pick, count: int) -> list[NDArray[np.float64]]:
        """Three rows of numbers from 0 to below 1."""
        positions = np.arange(count, dtype=np.uint64)
        keys = draw_keys(3, "masking", self.seed, pick.epoch, pick.index)
        return [(mix(positions, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 for key in keys]
