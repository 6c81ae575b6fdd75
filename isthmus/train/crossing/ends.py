"""What crosses a cut, made into packets and back: padding off, coded, measured and noted.

    DownCut   at the stage before a cut   activations leave, gradients come back
    UpCut     at the stage behind it      activations arrive, gradients leave

All of it happens on the couriers' threads, beside the computation.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isthmus.codec.base import Key, Payload
from isthmus.codec.ends import ReceivingEnd, SendingEnd
from isthmus.codec.meter import Fidelity, Meter
from isthmus.errors import FrameError
from isthmus.model.boundary import Batch
from isthmus.plan.types import Arrived, Pass, Send
from isthmus.train.crossing.bench import Bench
from isthmus.train.crossing.cache import Cache, sequences_of
from isthmus.train.crossing.coded import Coded
from isthmus.train.crossing.cut import RAW, Codebook
from isthmus.train.crossing.messages import (
    Gradient,
    Microbatch,
    pack_gradient,
    pack_microbatch,
    unpack_gradient,
    unpack_microbatch,
)
from isthmus.train.crossing.rows import drop_padding, mask_of, restore_padding, valid_rows
from isthmus.train.device import Lane, Mark
from isthmus.wan.packet import Packet


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """An activation whose gradient is awaited."""

    index_N: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return torch.Size(self.shape[:-1]).numel() if self.index_N is None else len(self.index_N)


class DownCut:
    """The cut behind a stage; `awaits_gradients` is false where all before it is frozen."""

    def __init__(
        self,
        *,
        book: Codebook[SendingEnd],
        bench: Bench,
        meter: Meter,
        is_plain: Callable[[Send | Arrived], bool],
        keeps_padding: bool,
        awaits_gradients: bool = True,
        drops_held: bool = False,
    ) -> None:
        self.book = book
        self.bench = bench
        self.meter = meter
        self._is_plain = is_plain
        self._keeps_padding = keeps_padding
        self._awaits_gradients = awaits_gradients
        self._drops_held = drops_held
        self._sent: dict[tuple[int, int], _Sent] = {}

    def pack(self, microbatch: Microbatch, *, about: Send, after: Mark) -> Packet:
        """An activation as a packet."""
        coded = None
        if microbatch.crossing is not None:
            coded = self._encode(microbatch, microbatch.crossing, about, after)
        packet = pack_microbatch(microbatch, coded, about=about, sent_s=time.time())
        if not self._is_plain(about):
            self.bench.weigh(packet, num_rows=0 if coded is None else coded.num_rows)
        return packet

    def unpack(self, packet: Packet, arrived: Arrived) -> Tensor:
        """The gradient of an activation, of its shape and type."""
        sent = self._sent.pop((arrived.step, arrived.microbatch), None)
        if sent is None:
            raise FrameError(f"a gradient has come for {arrived}, which was not sent")
        code = self.book.at(arrived.step)
        coded = unpack_gradient(packet)

        def decode(payload: Payload) -> Tensor:
            return code.end.decode_gradient(payload, key=_key(arrived), num_rows=sent.num_rows)

        started_s = time.time()
        with self.bench.lane.work():
            rows = self.bench.rows(coded, code.gradient, decode, num_rows=sent.num_rows, width=sent.shape[-1])
            gradient = restore_padding(rows.to(sent.dtype), sent.index_N, shape=sent.shape)
        self.bench.note_decoded(coded, arrived, started_s)
        return self.bench.lane.hand_over(gradient)

    def lowest_cosine(self) -> float:
        """Of the activations measured since this was last asked; NaN if there were none."""
        return _cosine(self.meter.take())

    def _encode(self, microbatch: Microbatch, crossing_BTD: Tensor, about: Send, after: Mark) -> Coded:
        code = self.book.at(about.step)
        codec = RAW if self._is_plain(about) else code.pair.forward
        index = _rows_that_cross(microbatch, keeps_padding=self._keeps_padding, drops_held=self._drops_held)
        learns = about.kind is Pass.FORWARD
        keeps = learns and self._awaits_gradients
        if keeps:
            self._sent[about.step, about.microbatch] = _Sent(
                index_N=index, shape=tuple(crossing_BTD.shape), dtype=crossing_BTD.dtype
            )

        def encode(rows_ND: Tensor) -> Payload:
            key, ids = _key(about), _ids_of(microbatch.batch, index, self.bench.lane)
            payload = code.end.encode(rows_ND, key=key, ids_N=ids, keeps=keeps, learns=learns)
            if about.kind is Pass.FORWARD and self.meter.is_due(key):
                arrives = code.end.preview(payload, key=key, num_rows=len(rows_ND), ids_N=ids)
                self.bench.note_measured(key, self.meter.note(rows_ND, arrives))
            return payload

        started_s = time.time()
        with self.bench.lane.work(after=after):
            coded = self.bench.code(drop_padding(crossing_BTD, index), codec, encode)
        self.bench.note_encoded(coded, about, started_s)
        return coded


class UpCut:
    """The cut before a stage; `cache` is at the first trained stage behind frozen ones."""

    def __init__(
        self,
        *,
        book: Codebook[ReceivingEnd],
        bench: Bench,
        meter: Meter,
        is_plain: Callable[[Send | Arrived], bool],
        keeps_padding: bool,
        sends_gradients: bool = True,
        cache: Cache | None = None,
    ) -> None:
        self.book = book
        self.bench = bench
        self.meter = meter
        self.cache = cache
        self._is_plain = is_plain
        self._keeps_padding = keeps_padding
        self._sends_gradients = sends_gradients

    def unpack(self, packet: Packet, arrived: Arrived) -> Microbatch:
        """A micro-batch, with what crossed on the device, of shape (batch, tokens, width)."""
        found, coded = unpack_microbatch(packet)
        crossing = None if coded is None else self._decode(found, coded, arrived)
        if self.cache is not None and not self._is_plain(arrived):
            crossing = self._complete(self.cache, found, crossing)
        return replace(found, crossing=crossing)

    def pack(self, gradient: Gradient, *, about: Send, after: Mark) -> Packet:
        """The gradient of what arrived as a packet."""
        code = self.book.at(about.step)
        index = valid_rows(None if self._keeps_padding else gradient.mask)

        def encode(rows_ND: Tensor) -> Payload:
            key = _key(about)
            is_due = self.meter.is_due(key)
            payload = code.end.encode_gradient(rows_ND, key=key, keeps=is_due)
            if is_due:
                arrives = code.end.preview_gradient(payload, key=key, num_rows=len(rows_ND))
                self.bench.note_measured(key, self.meter.note(rows_ND, arrives))
            return payload

        started_s = time.time()
        with self.bench.lane.work(after=after):
            coded = self.bench.code(drop_padding(gradient.values, index), code.gradient, encode)
        self.bench.note_encoded(coded, about, started_s)
        packet = pack_gradient(coded, about=about, sent_s=time.time())
        self.bench.weigh(packet, num_rows=coded.num_rows)
        return packet

    def lowest_cosine(self) -> float:
        """Of the gradients measured since this was last asked; NaN if there were none."""
        return _cosine(self.meter.take())

    def _decode(self, found: Microbatch, coded: Coded, arrived: Arrived) -> Tensor:
        code = self.book.at(arrived.step)
        codec = RAW if self._is_plain(arrived) else code.pair.forward
        index = _rows_that_cross(found, keeps_padding=self._keeps_padding, drops_held=self.cache is not None)
        num_rows = found.batch.ids.numel() if index is None else len(index)
        keeps = arrived.kind is Pass.FORWARD and self._sends_gradients

        def decode(payload: Payload) -> Tensor:
            ids = _ids_of(found.batch, index, self.bench.lane)
            return code.end.decode(payload, key=_key(arrived), num_rows=num_rows, ids_N=ids, keeps=keeps)

        started_s = time.time()
        with self.bench.lane.work():
            rows = self.bench.rows(coded, codec, decode, num_rows=num_rows, width=code.width)
            crossing = restore_padding(rows, index, shape=(*found.batch.ids.shape, code.width))
        self.bench.note_decoded(coded, arrived, started_s)
        return self.bench.lane.hand_over(crossing)

    def _complete(self, cache: Cache, found: Microbatch, crossing_BTD: Tensor | None) -> Tensor:
        """Put what the cache holds to what has crossed, and keep of that what the cache admits."""
        batch = found.batch
        sequences = sequences_of(batch, keeps_padding=self._keeps_padding)
        cache.meet(sequences, held=found.held)
        with self.bench.lane.work():
            if crossing_BTD is not None:
                cache.keep(sequences, self._new_rows(found, crossing_BTD))
            if found.held:
                rows = self.bench.lane.to_device(cache.find(sequences, found.held))
                new = set(range(len(batch.ids))).difference(found.held)
                index = valid_rows(mask_of(batch, keeps_padding=self._keeps_padding), without=new)
                if crossing_BTD is None:
                    shape = (*batch.ids.shape, rows.shape[-1])
                    crossing_BTD = restore_padding(rows, index, shape=shape)
                elif index is not None:
                    crossing_BTD.flatten(0, -2)[index.to(rows.device)] = rows
        if crossing_BTD is None:
            raise FrameError("a micro-batch of no sequences")
        return self.bench.lane.hand_over(crossing_BTD)

    def _new_rows(self, found: Microbatch, crossing_BTD: Tensor) -> dict[int, Tensor]:
        valid_BT = mask_of(found.batch, keeps_padding=self._keeps_padding).bool()
        new = [number for number in range(len(valid_BT)) if number not in found.held]
        return {number: crossing_BTD[number][valid_BT[number].to(crossing_BTD.device)] for number in new}


def _rows_that_cross(microbatch: Microbatch, *, keeps_padding: bool, drops_held: bool) -> Tensor | None:
    """The numbers of the rows that cross with a micro-batch; None where all do."""
    if drops_held and microbatch.held:
        mask = mask_of(microbatch.batch, keeps_padding=keeps_padding)
        return valid_rows(mask, without=microbatch.held)
    return valid_rows(None if keeps_padding else microbatch.batch.mask)


def _ids_of(batch: Batch, index_N: Tensor | None, lane: Lane) -> Tensor:
    """The token ids of the rows that cross, on the device."""
    ids = batch.ids.flatten()
    return lane.to_device(ids if index_N is None else ids[index_N])


def _cosine(worst: Fidelity | None) -> float:
    return math.nan if worst is None else worst.cosine


def _key(about: Send | Arrived) -> Key:
    return Key(step=about.step, microbatch=about.microbatch)
