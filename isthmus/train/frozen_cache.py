"""Activations of frozen layers, kept by the first trained stage: what was there before need not cross again.

Frozen layers make the same of the same tokens. So a sequence is known by its integers alone, whatever its
number and the epoch, and both ends know without a word what the cache holds: it takes what comes until it is
full, and gives nothing up. In a run over the same data again and again, that beats forgetting the oldest,
which would always be the next to be asked for.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.train.device import SideStream
from isthmus.train.integers import IDS, MASK, mask_of, restore_padding, valid_rows
from isthmus.units import format_bytes, shorten

HELD: Final = "held"
"""The numbers of the sequences of a micro-batch that the cache holds; they need not cross."""
_PLANES: Final = (IDS, "position_ids", "token_type_ids", "keys")

Integers = Mapping[str, Tensor]


def held_of(integers: Integers) -> tuple[int, ...] | None:
    """The numbers of the sequences that the sender leaves out, checked; None where nothing is cached."""
    held = integers.get(HELD)
    if held is None:
        return None
    numbers = tuple(held.flatten().tolist())
    if held.ndim != 1 or list(numbers) != sorted(set(numbers) & set(range(len(integers[IDS])))):
        raise FrameError("a micro-batch that leaves out sequences that it does not have")
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences of a micro-batch: what each is known by, and how many rows it has."""

    keys: tuple[bytes, ...]
    num_rows: tuple[int, ...]


def sequences_of(integers: Integers, *, keeps_padding: bool) -> Sequences:
    """Know the sequences of a micro-batch by their integers."""
    valid_BT = mask_of(integers[IDS], integers.get(MASK), keeps_padding=keeps_padding)
    names = (*_PLANES, MASK) if keeps_padding else _PLANES
    present = [(number, integers[name]) for number, name in enumerate(names) if name in integers]
    keys = tuple(_key(present, row, valid.bool()) for row, valid in enumerate(valid_BT))
    return Sequences(keys=keys, num_rows=tuple(valid_BT.sum(1).tolist()))


def _key(planes: Sequence[tuple[int, Tensor]], row: int, valid_T: Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for number, plane in planes:
        digest.update(number.to_bytes(1))
        own = plane[row]
        digest.update((own[valid_T] if own.ndim else own).numpy().tobytes())
    return digest.digest()


class Admission:
    """Which sequences a cache has; the same at every end that meets the same micro-batches in one order."""

    def __init__(self, *, max_bytes: int, row_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._row_bytes = row_bytes
        self._keys: set[bytes] = set()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def meet(self, sequences: Sequences) -> tuple[int, ...]:
        """The sequences of a micro-batch that are held already; of the others, admit those that fit."""
        held = tuple(number for number, key in enumerate(sequences.keys) if key in self._keys)
        for key, num_rows in zip(sequences.keys, sequences.num_rows, strict=True):
            num_bytes = num_rows * self._row_bytes
            if key not in self._keys and self.held_bytes + num_bytes <= self._max_bytes:
                self._keys.add(key)
                self.held_bytes += num_bytes
        return held

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """Tells the first stage, which reads the data, what the cache of the first trained one will hold."""

    admission: Admission
    keeps_padding: bool

    def held(self, integers: Integers) -> tuple[int, ...]:
        """The sequences of a micro-batch that need not cross."""
        return self.admission.meet(sequences_of(integers, keeps_padding=self.keeps_padding))


class Cache:
    """The activations of the sequences that were admitted, in host memory."""

    def __init__(self, admission: Admission, *, keeps_padding: bool) -> None:
        self.admission = admission
        self.saved_bytes = 0
        self._keeps_padding = keeps_padding
        self._rows: dict[bytes, Tensor] = {}

    def complete(self, hidden_BTD: Tensor | None, integers: Integers, lane: SideStream) -> Tensor:
        """Add what the cache holds to what has crossed, and keep of that what the cache admits."""
        sequences = sequences_of(integers, keeps_padding=self._keeps_padding)
        held = held_of(integers) or ()
        self.meet(sequences, held=held)
        valid_BT = mask_of(integers[IDS], integers.get(MASK), keeps_padding=self._keeps_padding)
        with lane.work():
            if hidden_BTD is not None:
                self.keep(sequences, _new_rows(hidden_BTD, valid_BT, held))
            if held:
                rows = lane.to_device(self.find(sequences, held))
                index = valid_rows(valid_BT, without=set(range(len(valid_BT))).difference(held))
                if hidden_BTD is None:
                    shape = (*valid_BT.shape, rows.shape[-1])
                    hidden_BTD = restore_padding(rows, index, shape=shape)
                elif index is not None:
                    hidden_BTD.flatten(0, -2)[index.to(rows.device)] = rows
        if hidden_BTD is None:
            raise FrameError("a micro-batch of no sequences")
        return lane.hand_over(hidden_BTD)

    def meet(self, sequences: Sequences, *, held: Sequence[int]) -> None:
        """Follow the rule, and hold the sender to it."""
        if tuple(held) != self.admission.meet(sequences):
            raise FrameError("the sender counts on other sequences than the cache holds")

    def keep(self, sequences: Sequences, rows: Mapping[int, Tensor]) -> None:
        """Keep the rows of those sequences, by their number, that were admitted."""
        for number, rows_ND in rows.items():
            key = sequences.keys[number]
            if key in self.admission and key not in self._rows:
                # A copy: the tensor may be a view of a packet, all of which it would keep.
                self._rows[key] = rows_ND.to("cpu", copy=True)

    def find(self, sequences: Sequences, numbers: Sequence[int]) -> Tensor:
        """The rows of sequences that are held, one after the other."""
        found = [self._rows[sequences.keys[number]] for number in numbers]
        self.saved_bytes += sum(rows.nbytes for rows in found)
        return torch.cat(found)

    def describe(self) -> str:
        """What it came to, in words."""
        held, saved = (
            format_bytes(int(shorten(one))) for one in (self.admission.held_bytes, self.saved_bytes)
        )
        what = f"cached {len(self.admission)} sequences of frozen layers in {held}"
        return f"{what}; {saved}, counted raw, did not cross"


def _new_rows(hidden_BTD: Tensor, valid_BT: Tensor, held: Sequence[int]) -> dict[int, Tensor]:
    new = [number for number in range(len(valid_BT)) if number not in held]
    valid = valid_BT.bool().to(hidden_BTD.device)
    return {number: hidden_BTD[number][valid[number]] for number in new}
