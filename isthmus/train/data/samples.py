"""Samples: what one sequence of a micro-batch is made from, by its number and the epoch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus.model.families import IGNORED
from isthmus.train.data.order import Pick, draw_keys, mix

T = TypeVar("T")

Integers = NDArray[np.integer[Any]]
Arrays = Mapping[str, Integers]
"""Numbers of many samples by name, in memory or mapped from files."""

_AT_ONCE: Final = 1000
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedSamples:
    """Samples of different lengths behind each other, the same in every epoch."""

    ids: Integers
    ends: Integers
    """Where each sample ends in `ids`."""
    labels: Integers
    """One a token, or one or a row of them for each sample."""
    token_types: Integers | None
    has_tags: bool
    """Whether labels are one a token."""

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, pick: Pick) -> Sample:
        """The sample of that number."""
        start = int(self.ends[pick.index - 1]) if pick.index else 0
        own = slice(start, int(self.ends[pick.index]))
        return Sample(
            ids=self.ids[own],
            labels=self.labels[own] if self.has_tags else np.asarray(self.labels[pick.index]),
            token_types=None if self.token_types is None else self.token_types[own],
        )


def flatten(samples: Iterable[Sample], *, has_tags: bool) -> Iterator[Arrays]:
    """The arrays of `RaggedSamples`, in pieces to be put behind each other."""
    put_together = np.concatenate if has_tags else np.stack
    end = 0
    yield {"ids": np.empty(0, np.int32), "ends": np.empty(0, np.int64)}
    for own in in_chunks(samples):
        ends = end + np.cumsum([len(one.ids) for one in own], dtype=np.int64)
        end = int(ends[-1])
        types = [one.token_types for one in own if one.token_types is not None]
        yield {
            "ids": np.concatenate([one.ids for one in own]),
            "ends": ends,
            "labels": put_together([one.labels for one in own]),
            **({"token_types": np.concatenate(types)} if types else {}),
        }


def in_chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """All items in their order, many at once."""
    left = iter(items)
    while chunk := list(islice(left, _AT_ONCE)):
        yield chunk


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
