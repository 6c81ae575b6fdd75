"""Activations of frozen layers, kept by the first trained stage: what was there before need not cross again.

Frozen layers make the same of the same tokens. So a sequence is known by its integers alone, whatever its
number and the epoch, and both ends know without a word what the cache holds: it takes what comes until it is
full, and gives nothing up. In a run over the same data again and again, that beats forgetting the oldest,
which would always be the next to be asked for.
"""

import hashlib
from collections.abc import Mapping
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


def held_of(integers: Integers) -> tuple[int, ...]:
    """The numbers of the sequences that the sender leaves out, checked."""
    held = integers.get(HELD)
    if held is None:
        return ()
    numbers = tuple(held.flatten().tolist())
    if held.ndim != 1 or list(numbers) != sorted(set(numbers) & set(range(len(integers[IDS])))):
        raise FrameError("a micro-batch that leaves out sequences that it does not have")
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences of a micro-batch: what each is known by, and which of its tokens count."""

    keys: tuple[bytes, ...]
    valid_BT: Tensor


class Admission:
    """Which sequences a cache has; the same at every end that meets the same micro-batches in one order."""

    def __init__(self, *, max_bytes: int, row_bytes: int, keeps_padding: bool) -> None:
        self._max_bytes = max_bytes
        self._row_bytes = row_bytes
        self._keeps_padding = keeps_padding
        self.keys: set[bytes] = set()
        self.held_bytes = 0

    def know(self, integers: Integers) -> Sequences:
        """Know the sequences of a micro-batch by their integers."""
        valid_BT = mask_of(integers[IDS], integers.get(MASK), keeps_padding=self._keeps_padding).bool()
        names = (*_PLANES, MASK) if self._keeps_padding else _PLANES
        keys = []
        for row, valid_T in enumerate(valid_BT):
            digest = hashlib.blake2b(digest_size=16)
            for number, name in enumerate(names):
                if name in integers:
                    own = integers[name][row]
                    digest.update(number.to_bytes(1))
                    digest.update((own[valid_T] if own.ndim else own).numpy().tobytes())
            keys.append(digest.digest())
        return Sequences(keys=tuple(keys), valid_BT=valid_BT)

    def meet(self, sequences: Sequences) -> tuple[int, ...]:
        """The sequences of a micro-batch that are held already; of the others, admit those that fit."""
        held = tuple(number for number, key in enumerate(sequences.keys) if key in self.keys)
        for key, num_rows in zip(sequences.keys, sequences.valid_BT.sum(1).tolist(), strict=True):
            num_bytes = num_rows * self._row_bytes
            if key not in self.keys and self.held_bytes + num_bytes <= self._max_bytes:
                self.keys.add(key)
                self.held_bytes += num_bytes
        return held


class Cache:
    """The activations of the sequences that were admitted, in host memory."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.saved_bytes = 0
        self._rows: dict[bytes, Tensor] = {}

    def complete(self, hidden_BTD: Tensor | None, integers: Integers, lane: SideStream) -> Tensor:
        """Add what the cache holds to what has crossed, and keep of that what the cache admits."""
        sequences, held = self.admission.know(integers), held_of(integers)
        if held != self.admission.meet(sequences):
            raise FrameError("the sender counts on other sequences than the cache holds")
        with lane.work():
            if hidden_BTD is not None:
                self._keep(sequences, hidden_BTD, held)
            if held:
                found = torch.cat([self._rows[sequences.keys[number]] for number in held])
                self.saved_bytes += found.nbytes
                hidden_BTD = _fill_in(hidden_BTD, lane.to_device(found), sequences.valid_BT, held)
        if hidden_BTD is None:
            raise FrameError("a micro-batch of no sequences")
        return lane.hand_over(hidden_BTD)

    def _keep(self, sequences: Sequences, hidden_BTD: Tensor, held: tuple[int, ...]) -> None:
        valid_BT = sequences.valid_BT.to(hidden_BTD.device)
        for number, key in enumerate(sequences.keys):
            if number not in held and key in self.admission.keys and key not in self._rows:
                # A copy: the tensor may be a view of a packet, all of which it would keep.
                self._rows[key] = hidden_BTD[number][valid_BT[number]].to("cpu", copy=True)

    def describe(self) -> str:
        """What it came to, in words."""
        held, saved = (
            format_bytes(int(shorten(one))) for one in (self.admission.held_bytes, self.saved_bytes)
        )
        what = f"cached {len(self.admission.keys)} sequences of frozen layers in {held}"
        return f"{what}; {saved}, counted raw, did not cross"


def _fill_in(hidden_BTD: Tensor | None, rows_ND: Tensor, valid_BT: Tensor, held: tuple[int, ...]) -> Tensor:
    """Put the rows of some sequences in their places."""
    index = valid_rows(valid_BT, without=set(range(len(valid_BT))).difference(held))
    if hidden_BTD is None:
        return restore_padding(rows_ND, index, shape=(*valid_BT.shape, rows_ND.shape[-1]))
    if index is not None:
        hidden_BTD.flatten(0, -2)[index.to(rows_ND.device)] = rows_ND
    return hidden_BTD
