"""Recomputing only as much as a memory budget asks for, by the size of each micro-batch.

The first micro-batches are measured: what each layer keeps, and how long it takes. From then on a quadratic
of the input's length says what any micro-batch would keep, and the cheapest set of layers is recomputed that
makes it fit beside the others in flight. Results do not depend on the choice: recomputed layers draw
the dropout that they drew before.

    budget = standing            weights, gradients, optimizer
           + working             what one pass needs on top, at the largest size
           + one slot for each micro-batch of the window

A slot is never counted for less than the largest micro-batch keeps when it recomputes everything, so that the
next to take it always fits, however little is kept in it now.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from isthmus.model.cheapest import Saving, cheapest, whole_costs
from isthmus.model.growth import Growth
from isthmus.model.meter import LayerReading, Meter
from isthmus.model.stage import InputSize, Stay
from isthmus.units import format_bytes

_log = logging.getLogger(__name__)

_NUM_MEASURED: Final = 6
_LEAST_MEASURED: Final = 2
# Plans are kept for sizes rounded up to a multiple, and for room rounded down to a share of the budget.
_ROUNDED_TOKENS: Final = 32
_ROOM_STEPS: Final = 64
# Of the budget, for what is not counted: rounding by the allocator, messages that wait.
_SPARE_SHARE: Final = 0.03
# A new longest input is expected to be this much longer than the longest so far.
_HEADROOM: Final = 1.25
# Gradients that a backward holds at a time, as a multiple of what it goes through: a layer, or the head with
# the float32 scores of its loss.
_LAYER_GRADIENTS: Final = 1.0
_BESIDE_GRADIENTS: Final = 2.0


@dataclass(slots=True)
class _Layer:
    kept: Growth = field(default_factory=Growth)
    input: Growth = field(default_factory=Growth)
    s_per_token: float = float("inf")

    def freed_bytes(self, size: InputSize) -> int:
        return max(0, int(self.kept.at(size) - self.input.at(size)))

    def learn(self, size: InputSize, reading: LayerReading) -> None:
        self.kept.add(size, reading.kept_bytes)
        self.input.add(size, reading.input_bytes)
        self.s_per_token = min(self.s_per_token, reading.duration_s / size.num_tokens)


class Budgeted:
    """Keeps a stage within a memory budget.

    `standing_bytes` says what the memory holds when nothing is in flight, the gradients to come included;
    `max_length` is the longest input there can be, where that is known.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        standing_bytes: Callable[[], int],
        device: torch.device,
        max_length: int | None = None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._standing_bytes = standing_bytes
        self._device = device
        self._max_length = max_length
        self._layers: dict[int, _Layer] = {}
        self._beside = Growth()
        self._sizes: list[InputSize] = []
        self._in_flight: dict[int, int] = {}
        self._num_begun = 0
        self._standing = 0
        self._plans: dict[tuple[InputSize, int], frozenset[int]] = {}
        self._has_warned = False

    def begin(self, size: InputSize, *, window: int) -> Stay:
        """Choose what a micro-batch recomputes, given what the others in flight keep."""
        if not self._in_flight:
            self._standing = self._standing_bytes()
        number, self._num_begun = self._num_begun, self._num_begun + 1
        if self._is_unknown(size):
            self._in_flight[number] = 0
            return Stay(
                recomputed=frozenset(self._layers),
                meter=Meter(self._device),
                measured=partial(self._learn, number, size),
                end=partial(self._end, number),
            )
        rounded = self._rounded(size)
        recomputed = self._choose(rounded, self._room_bytes(window))
        self._in_flight[number] = self.kept_bytes(rounded, recomputed)
        return Stay(recomputed=recomputed, end=partial(self._end, number))

    def kept_bytes(self, size: InputSize, recomputed: frozenset[int]) -> int:
        """What a micro-batch keeps while it is in flight."""
        everything = self._beside.at(size) + sum(layer.kept.at(size) for layer in self._layers.values())
        return int(everything) - sum(self._layers[index].freed_bytes(size) for index in recomputed)

    def working_bytes(self, size: InputSize) -> int:
        """What a pass needs on top: a layer computed again, and gradients on their way through."""
        layer = max((one.kept.at(size) for one in self._layers.values()), default=0.0)
        return int(max(layer * (1 + _LAYER_GRADIENTS), self._beside.at(size) * _BESIDE_GRADIENTS))

    def _is_unknown(self, size: InputSize) -> bool:
        """Whether to measure a micro-batch: some at first, and later whatever is larger than all of them."""
        if not any(one.covers(size) for one in self._sizes):
            return True
        num_measured = len(self._sizes)
        return num_measured < _LEAST_MEASURED or (num_measured < _NUM_MEASURED and size not in self._sizes)

    def _learn(self, number: int, size: InputSize, meter: Meter) -> None:
        for index, reading in meter.layers().items():
            self._layers.setdefault(index, _Layer()).learn(size, reading)
        self._beside.add(size, meter.beside_bytes)
        self._sizes.append(size)
        self._plans.clear()
        if number in self._in_flight:
            self._in_flight[number] = self.kept_bytes(size, frozenset(self._layers))

    def _end(self, number: int) -> None:
        del self._in_flight[number]

    def _room_bytes(self, window: int) -> int:
        """What a micro-batch may keep: its share of what the slots that are taken leave."""
        largest = self._largest()
        least = self.kept_bytes(largest, frozenset(self._layers))
        spare = int(_SPARE_SHARE * self._budget_bytes)
        room = self._budget_bytes - spare - self._standing - self.working_bytes(largest)
        self._warn(window * least - room)
        taken = sum(max(kept, least) for kept in self._in_flight.values())
        return (room - taken) // max(1, window - len(self._in_flight))

    def _choose(self, size: InputSize, room_bytes: int) -> frozenset[int]:
        step = max(1, self._budget_bytes // _ROOM_STEPS)
        everything = self.kept_bytes(size, frozenset())
        key = size, max(0, min(room_bytes, everything)) // step if everything > room_bytes else -1
        if key not in self._plans:
            needed = 0 if everything <= room_bytes else everything - key[1] * step
            self._plans[key] = cheapest(self._savings(size), needed)
        return self._plans[key]

    def _savings(self, size: InputSize) -> list[Saving]:
        costs = whole_costs({index: layer.s_per_token for index, layer in self._layers.items()})
        return [
            Saving(layer=index, freed_bytes=layer.freed_bytes(size), cost=costs[index])
            for index, layer in sorted(self._layers.items())
        ]

    def _largest(self) -> InputSize:
        """The largest input to be ready for."""
        longest = max(size.length for size in self._sizes)
        length = max(longest, min(int(_HEADROOM * longest), self._max_length or int(_HEADROOM * longest)))
        return InputSize(max(size.num_sequences for size in self._sizes), length)

    def _rounded(self, size: InputSize) -> InputSize:
        """A size that stands for all that are little smaller, so that there are few plans."""
        multiple = max(1, _ROUNDED_TOKENS // size.num_sequences)
        length = -(-size.length // multiple) * multiple
        return InputSize(size.num_sequences, length) if length <= self._largest().length else size

    def _warn(self, missing_bytes: int) -> None:
        if missing_bytes > 0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the memory budget of %s is about %s too small even with everything recomputed; use more "
                "micro-batches, or lower strategy.max_in_flight",
                format_bytes(self._budget_bytes),
                format_bytes(missing_bytes),
            )
