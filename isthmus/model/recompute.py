"""Recomputing only as much as a memory budget asks for, by the size of each micro-batch.

The first micro-batches are measured: what each layer keeps. From then on their sizes bound what any
micro-batch would keep, and as few layers are recomputed as make it fit beside the others in
flight. Results do not depend on the choice: recomputed layers draw the dropout that they drew before.

    budget = standing            weights, gradients, optimizer
           + working             what one pass needs on top, at the largest size
           + one slot for each micro-batch of the window

A slot is never counted for less than the largest micro-batch keeps when it recomputes everything, so that the
next to take it always fits, however little is kept in it now.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from isthmus.units import format_bytes

_log = logging.getLogger(__name__)

_NUM_MEASURED: Final = 6
_LEAST_MEASURED: Final = 2
# Of the budget, for what is not counted: rounding by the allocator, messages that wait.
_SPARE_SHARE: Final = 0.03
# A new longest input is expected to be this much longer than the longest so far.
_HEADROOM: Final = 1.25
# Gradients that a backward holds at a time, as a multiple of what it goes through: a layer, or the head with
# the float32 scores of its loss.
_LAYER_GRADIENTS: Final = 1.0
_BESIDE_GRADIENTS: Final = 2.0


@dataclass(frozen=True, slots=True, order=True)
class InputSize:
    """The shape of a micro-batch, padding included."""

    num_sequences: int
    length: int

    @property
    def num_tokens(self) -> int:
        """What most activations grow with."""
        return self.num_sequences * self.length

    @property
    def num_pairs(self) -> int:
        """What scores of attention grow with, where they are kept."""
        return self.num_sequences * self.length**2

    def covers(self, other: "InputSize") -> bool:
        """Whether nothing takes more memory at the other size than at this one."""
        return self.num_sequences >= other.num_sequences and self.length >= other.length


class Meter:
    """Measures what one pass of a stage keeps for its backward; storages count once."""

    def __init__(self) -> None:
        self.kept_bytes: dict[int, int] = {}
        """By layer, unless it recomputes."""
        self.input_bytes: dict[int, int] = {}
        """By layer: what it keeps if it recomputes."""
        self._beside = _Saved()

    @property
    def beside_bytes(self) -> int:
        """What is kept outside the layers: by embedding and head, and for the next stage."""
        return self._beside.num_bytes

    def freed_bytes(self, layer: int) -> int:
        """What a layer does not keep if it recomputes."""
        return max(0, self.kept_bytes[layer] - self.input_bytes[layer])

    @contextmanager
    def beside(self, standing: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Note what is kept outside the layers within this block, without weights and buffers.

        `standing` gives these again and again, as gathered weights come and go.
        """
        self._beside.standing = standing
        with self._beside.noting():
            yield

    def keep(self, tensor: Tensor) -> None:
        """Note a tensor that stays, though no backward asks for it: what leaves for the next stage."""
        self._beside.note(tensor)

    def run_layer(
        self, index: int, run: Callable[[], Any], *, hidden: Tensor, others: Iterable[Tensor]
    ) -> None:
        """Measure a layer without its input, and without `others`, which it is given beside that."""
        self._beside.leave_out([hidden])
        self.input_bytes[index] = hidden.untyped_storage().nbytes()
        saved = _Saved()
        saved.leave_out(others)
        with saved.noting():
            run()
        self.kept_bytes[index] = saved.num_bytes


class _Saved:
    """Storages that autograd keeps; each counts once, however many tensors lie in it."""

    def __init__(self) -> None:
        self.standing: Callable[[], Iterable[Tensor]] = tuple
        self._bytes: dict[int, int] = {}
        self._left_out: set[int] = set()

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        self._left_out.update(map(_address, tensors))

    def note(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._left_out and address not in map(_address, self.standing()):
            self._bytes[address] = tensor.untyped_storage().nbytes()
        # An operation's own output, kept with its history, would never be freed.
        return tensor.detach()

    def noting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.note, lambda tensor: tensor)


def _address(tensor: Tensor) -> int:
    """Where a tensor lies; of a sharded one, this rank's part."""
    with torch.no_grad():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSlot:
    """One micro-batch in the memory of a stage, from its forward to the end of its backward."""

    recomputed: frozenset[int] = frozenset()
    """Layers, by their number in the model, that compute again."""
    meter: Meter | None = None
    """Measures this forward, where that is wanted."""
    measured: Callable[[Meter], None] = field(default=lambda _: None)
    """To be called with the meter when the forward has ended."""
    end: Callable[[], None] = field(default=lambda: None)
    """To be called when the backward has ended."""


class Recompute(Protocol):
    """Chooses for each micro-batch."""

    def begin(self, size: InputSize, *, window: int) -> ActivationSlot:
        """Let a micro-batch in, where at most `window` of them are in flight at a time."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same layers whatever comes."""

    layers: frozenset[int] = frozenset()

    def begin(self, size: InputSize, *, window: int) -> ActivationSlot:  # noqa: ARG002 a budget does
        """Let a micro-batch in."""
        return ActivationSlot(recomputed=self.layers)


def fewest(freed_bytes: Mapping[int, int], needed_bytes: int) -> frozenset[int]:
    """The fewest layers that free at least so much; all that free anything if even that is too little.

    The largest are taken first, and the last is the smallest that suffices. Among equals the earlier layers
    are taken, whose activations would be kept for longest.
    """
    rest = sorted(
        (layer for layer, freed in freed_bytes.items() if freed > 0), key=lambda one: (-freed_bytes[one], one)
    )
    chosen: set[int] = set()
    while needed_bytes > 0 and rest:
        enough = [layer for layer in rest if freed_bytes[layer] >= needed_bytes]
        layer = min(enough, key=lambda one: (freed_bytes[one], one), default=rest[0])
        rest.remove(layer)
        chosen.add(layer)
        needed_bytes -= freed_bytes[layer]
    return frozenset(chosen)


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
        max_length: int | None = None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._standing_bytes = standing_bytes
        self._max_length = max_length
        self._measured: list[tuple[InputSize, Meter]] = []
        self._in_flight: dict[int, int] = {}
        self._num_begun = 0
        self._standing = 0
        self._has_warned = False

    def begin(self, size: InputSize, *, window: int) -> ActivationSlot:
        """Choose what a micro-batch recomputes, given what the others in flight keep."""
        if not self._in_flight:
            self._standing = self._standing_bytes()
        number, self._num_begun = self._num_begun, self._num_begun + 1
        if self._is_unknown(size):
            self._in_flight[number] = 0
            return ActivationSlot(
                meter=Meter(),
                measured=partial(self._learn, number, size),
                end=partial(self._end, number),
            )
        meter, ratio = self._nearest(size)
        freed_bytes = {index: int(ratio * meter.freed_bytes(index)) for index in meter.kept_bytes}
        recomputed = fewest(freed_bytes, self.kept_bytes(size, frozenset()) - self._room_bytes(window))
        self._in_flight[number] = self.kept_bytes(size, recomputed)
        return ActivationSlot(recomputed=recomputed, end=partial(self._end, number))

    def kept_bytes(self, size: InputSize, recomputed: frozenset[int] | None = None) -> int:
        """What a micro-batch keeps in flight that recomputes these layers, all unless given."""
        meter, ratio = self._nearest(size)
        own = sum(meter.kept_bytes.values())
        freed = sum(map(meter.freed_bytes, meter.kept_bytes if recomputed is None else recomputed))
        return int(ratio * (meter.beside_bytes + own - freed))

    def working_bytes(self, size: InputSize) -> int:
        """What a pass needs on top: a layer computed again, and gradients on their way through."""
        meter, ratio = self._nearest(size)
        layer = max(meter.kept_bytes.values(), default=0)
        return int(ratio * max(layer * (1 + _LAYER_GRADIENTS), meter.beside_bytes * _BESIDE_GRADIENTS))

    def _nearest(self, size: InputSize) -> tuple[Meter, float]:
        """What was measured at the nearest size, and the most by which it may differ at this one.

        All that is kept grows with the tokens at least, and with the pairs of tokens at most.
        """
        ratios = [
            (max(size.num_tokens / one.num_tokens, size.num_pairs / one.num_pairs), meter)
            for one, meter in self._measured
        ]
        ratio, meter = min(ratios, key=lambda one: abs(math.log(one[0])))
        return meter, ratio

    def _is_unknown(self, size: InputSize) -> bool:
        """Whether to measure a micro-batch: some at first, and later whatever is larger than all of them."""
        sizes = [one for one, _ in self._measured]
        if not any(one.covers(size) for one in sizes):
            return True
        return len(sizes) < _LEAST_MEASURED or (len(sizes) < _NUM_MEASURED and size not in sizes)

    def _learn(self, number: int, size: InputSize, meter: Meter) -> None:
        self._measured.append((size, meter))
        if number in self._in_flight:
            self._in_flight[number] = self.kept_bytes(size)

    def _end(self, number: int) -> None:
        del self._in_flight[number]

    def _room_bytes(self, window: int) -> int:
        """What a micro-batch may keep: its share of what the slots that are taken leave."""
        largest = self._largest()
        least = self.kept_bytes(largest)
        spare = int(_SPARE_SHARE * self._budget_bytes)
        room = self._budget_bytes - spare - self._standing - self.working_bytes(largest)
        self._warn(window * least - room)
        taken = sum(max(kept, least) for kept in self._in_flight.values())
        return (room - taken) // max(1, window - len(self._in_flight))

    def _largest(self) -> InputSize:
        """The largest input to be ready for."""
        sizes = [one for one, _ in self._measured]
        longest = max(size.length for size in sizes)
        length = max(longest, min(int(_HEADROOM * longest), self._max_length or int(_HEADROOM * longest)))
        return InputSize(max(size.num_sequences for size in sizes), length)

    def _warn(self, missing_bytes: int) -> None:
        if missing_bytes > 0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the memory budget of %s is about %s too small even with everything recomputed; use more "
                "micro-batches, or lower strategy.max_in_flight",
                format_bytes(self._budget_bytes),
                format_bytes(missing_bytes),
            )
