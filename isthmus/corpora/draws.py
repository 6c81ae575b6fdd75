"""Draws that are the same for every version of Python, unlike those of its random module."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of draws that depends on its name alone."""

    def __init__(self, name: str) -> None:
        self._key = hashlib.blake2b(name.encode()).digest()
        self._num_drawn = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit - 1; the bias of the remainder is far below one in a billion."""
        self._num_drawn += 1
        drawn = hashlib.blake2b(self._num_drawn.to_bytes(8), key=self._key, digest_size=8)
        return int.from_bytes(drawn.digest()) % limit

    def between(self, least: int, most: int) -> int:
        """A whole number from least to most."""
        return least + self.below(most - least + 1)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def several(self, options: Sequence[T], count: int) -> list[T]:
        """Some of the options, each at most once."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]
