"""The order in which samples are read: a permutation for each epoch, computed and never stored."""

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS: Final = 6
_HALF: Final = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a run has read: all earlier epochs, and so many samples of this one."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A sample to be read, and the epoch it is read in."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Every sample once an epoch, each epoch in an order of its own."""

    num_samples: int
    seed: int

    def take(self, cursor: Cursor, count: int) -> tuple[list[Pick], Cursor]:
        """The next samples, over the end of epochs if need be, and the cursor behind them."""
        picks: list[Pick] = []
        while len(picks) < count:
            stop = min(cursor.position + count - len(picks), self.num_samples)
            indices = self.permute(np.arange(cursor.position, stop), epoch=cursor.epoch)
            picks += [Pick(epoch=cursor.epoch, index=int(index)) for index in indices]
            cursor = self._normal(Cursor(epoch=cursor.epoch, position=stop))
        return picks, cursor

    def permute(self, positions: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """The samples at some positions of an epoch: a Feistel network over a square that holds them all.

        What falls outside of the samples goes through the network again until it falls inside.
        """
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        keys = draw_keys(_NUM_ROUNDS, "order", self.seed, epoch)
        values = positions.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            values[outside] = _feistel(values[outside], keys, half_bits)
            outside = values >= self.num_samples
        return values.astype(np.int64)

    def _normal(self, cursor: Cursor) -> Cursor:
        return cursor if cursor.position < self.num_samples else Cursor(epoch=cursor.epoch + 1)


def draw_keys(count: int, *parts: object) -> NDArray[np.uint64]:
    """Numbers of 64 bits that depend on every part."""
    drawn = (hashlib.blake2b(repr((*parts, number)).encode(), digest_size=8) for number in range(count))
    return np.array([int.from_bytes(one.digest()) for one in drawn], dtype=np.uint64)


def mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Numbers of 64 bits that look random, each from its value and the key: the finish of SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    shift, low = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & low
    for key in keys:
        left, right = right, left ^ (mix(right, key) >> _HALF & low)
    return left << shift | right
