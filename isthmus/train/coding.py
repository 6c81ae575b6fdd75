"""Hidden states at one end of a cut: without padding, coded to bytes on the host and back, on other threads.

    sending end     at the stage before a cut   activations leave, gradients come back
    receiving end   at the stage behind it      activations arrive, gradients leave

The codecs of a message are named in it. When they differ from those before, the end starts with fresh codec
state; a gradient is coded with the state of its activation.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from isthmus.codec.base import Key, Payload, flat_bytes
from isthmus.codec.chain import CodecEnd, Codecs, Fidelity, measure
from isthmus.errors import FrameError, UserError
from isthmus.job.codec import CodecSpec, gradient_codec
from isthmus.plan.codecs import RAW_PAIR, Cut, Pair, read_pair, texts_of
from isthmus.plan.pipeline_parts import GRADIENT, HIDDEN
from isthmus.plan.types import Message, MessageKind
from isthmus.train.device import Device, Mark, SideStream
from isthmus.train.frozen_cache import HELD, Cache, held_of
from isthmus.train.integers import IDS, drop_padding, restore_padding

_RAW: Final = texts_of(RAW_PAIR)
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Integers = Mapping[str, Tensor]
RowRule = Callable[[Integers], Tensor | None]
"""The numbers of the rows of hidden states that cross with these integers; None where all do."""


class Coded(NamedTuple):
    """Rows as bytes on the host: the parts of a payload in their order, and what a header says of them."""

    codec: str
    dtype: torch.dtype
    num_rows: int
    parts: tuple[Tensor, ...]
    fidelity: Fidelity | None = None
    """What coding changed, where the sender measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCoding:
    """What both ends of a cut agree on beside the codecs."""

    cut: Cut
    hidden_width: int
    crossing_width: int
    """Elements per token that cross once a bottleneck has started."""
    seed: int = 0
    num_microbatches: int = 1
    returns_gradients: bool = True
    """Whether gradients come back over this cut: not to frozen stages."""
    may_omit: bool = False
    """Whether a micro-batch may cross without hidden states: between frozen stages, where a cache behind them
    holds all of it."""
    rows: RowRule
    ids: Callable[[Integers], Tensor] = lambda integers: integers[IDS]
    """The token ids of the hidden states, of shape (batch, tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecState:
    """The codecs of a cut at the start of a step, and their state at one end, on the host."""

    pair: Pair
    tensors: Mapping[str, Tensor]


class _Crossed(NamedTuple):
    """Hidden states that cross, or have crossed: their gradient is coded as they were."""

    index_N: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    pair: Pair
    end: CodecEnd | None
    """None where both directions are raw."""

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1]) if self.index_N is None else len(self.index_N)

    @property
    def coder(self) -> CodecEnd:
        if self.end is None:
            raise FrameError("a message is coded at a cut that has no codecs")
        return self.end


@dataclass(slots=True)
class CutEnd:
    """One end of a cut between this member and one other; encoding and decoding have a thread each."""

    coding: CutCoding
    device: Device
    is_sender: bool
    cache: Cache | None = None
    """At the first trained stage behind frozen ones."""
    lane: SideStream = field(init=False)
    _pair: Pair = RAW_PAIR
    """The codecs that the codec state is for."""
    _end: CodecEnd | None = None
    _awaited: dict[tuple[int, int], _Crossed] = field(default_factory=dict)
    """The activations whose gradients are still to come, or to go."""
    _step: int = -1
    _at_start: CodecState | None = None

    def __post_init__(self) -> None:
        self.lane = self.device.side_stream()

    def encode(self, message: Message, hidden: Tensor, integers: Integers, *, after: Mark) -> Coded:
        """Hidden states, or their gradient, as bytes on the host, which are there when this returns."""
        if message.kind is MessageKind.GRADIENT:
            return self._encode_gradient(message, hidden, after)
        own = self._activation(message, integers, tuple(hidden.shape), hidden.dtype)
        is_training = message.kind is MessageKind.ACTIVATION
        with self.lane.work(after=after):
            rows_ND = drop_padding(hidden, own.index_N)
            if own.pair.forward.is_raw:
                return self._on_host(own.pair.forward, rows_ND, (flat_bytes(rows_ND),))
            key, ids_N, fidelity = _key(message), self._ids(integers, own.index_N), None
            keeps = is_training and self.coding.returns_gradients
            payload = own.coder.encode(rows_ND, key=key, ids_N=ids_N, keeps=keeps, learns=is_training)
            if is_training and self._is_measured(key):
                num_rows = len(rows_ND)
                arrives = own.coder.decode(payload, key=key, num_rows=num_rows, ids_N=ids_N, keeps=False)
                fidelity = measure(rows_ND, arrives)
            return self._on_host(own.pair.forward, rows_ND, payload, fidelity)

    def decode(self, message: Message, coded: Coded | None, integers: Integers) -> Tensor | None:
        """Hidden states of shape (batch, tokens, width), or their gradient, on the device.

        Nothing is coded where the cache of frozen layers holds every sequence of a micro-batch: the first
        trained stage takes all of it from there, and frozen stages before it get None.
        """
        if (message.kind is MessageKind.GRADIENT) is not self.is_sender:
            raise FrameError(f"{message.name} has come from the wrong side of a cut")
        if message.kind is MessageKind.GRADIENT:
            if coded is None:
                raise FrameError(f"{message.name} without hidden states")
            return self._decode_gradient(message, coded)
        self._check_ids(message, integers)
        hidden = None if coded is None else self._decode_activation(message, coded, integers)
        if self.cache is not None and HELD in integers:
            return self.cache.complete(hidden, integers, self.lane)
        is_held = HELD in integers and len(held_of(integers)) == len(integers[IDS])
        if hidden is None and not (self.coding.may_omit and is_held):
            raise FrameError(f"{message.name} without hidden states")
        return hidden

    def to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What crosses uncoded beside hidden states that were encoded before, on the host."""
        if not tensors:
            return {}
        with self.lane.work():
            return {name: self.lane.to_host(one.contiguous()) for name, one in tensors.items()}

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What crossed uncoded, on the device."""
        if not tensors:
            return {}
        with self.lane.work():
            found = {name: self.lane.to_device(one) for name, one in tensors.items()}
        return {name: self.lane.hand_over(one) for name, one in found.items()}

    def state(self, step: int) -> CodecState:
        """What the first message of a step depends on; all messages of the step before have been coded."""
        if self._at_start is not None and self._step >= step:
            return self._at_start
        return self._snapshot()

    def load(self, state: CodecState) -> None:
        """Continue as from the state that was taken."""
        self._pair, self._end = state.pair, self._make(state.pair)
        if self._end is None:
            return
        try:
            with self.lane.work():
                self._end.load_state_dict(dict(state.tensors))
        except (ValueError, KeyError) as error:
            raise UserError(
                f"the state of codec {state.pair.forward} in the checkpoint cannot be used: {error}",
                hint="start again from the beginning with --resume never",
            ) from error

    # Activations.

    def _activation(
        self, message: Message, integers: Integers, shape: tuple[int, ...], dtype: torch.dtype
    ) -> _Crossed:
        """How an activation crosses, which its gradient needs to know."""
        own = _Crossed(self.coding.rows(integers), shape, dtype, *self._switch(message))
        if message.kind is MessageKind.ACTIVATION and self.coding.returns_gradients:
            self._awaited[message.step, message.item] = own
        return own

    def _decode_activation(self, message: Message, coded: Coded, integers: Integers) -> Tensor:
        if message.step > self._step:
            # The state with which a step starts is taken before its first message changes it.
            self._step, self._at_start = message.step, self._snapshot()
        coding = self.coding
        is_warm = message.step >= coding.cut.num_warmup_steps
        shape = *coding.ids(integers).shape, coding.crossing_width if is_warm else coding.hidden_width
        own = self._activation(message, integers, shape, coded.dtype)
        with self.lane.work():
            payload = self._on_device(coded, own.pair.forward, own)
            if own.pair.forward.is_raw:
                rows_ND = payload[0].view(coded.dtype).view(own.num_rows, shape[-1])
            else:
                keeps = message.kind is MessageKind.ACTIVATION and coding.returns_gradients
                ids_N, num_rows = self._ids(integers, own.index_N), own.num_rows
                rows_ND = own.coder.decode(
                    payload, key=_key(message), num_rows=num_rows, ids_N=ids_N, keeps=keeps
                )
            hidden = restore_padding(rows_ND.to(coded.dtype), own.index_N, shape=shape)
        return self.lane.hand_over(hidden)

    def _check_ids(self, message: Message, integers: Integers) -> None:
        """Refuse more tokens than a micro-batch of the job has, before memory is taken for them."""
        if IDS not in integers or integers[IDS].ndim != 2:
            raise FrameError(f"{message.name} without token ids")
        num_tokens = max(integers[IDS].numel(), self.coding.ids(integers).numel())
        if num_tokens > (most := self.coding.cut.crossing.num_rows):
            raise FrameError(f"{message.name} of {num_tokens} tokens, where {most} are the most")

    def _ids(self, integers: Integers, index_N: Tensor | None) -> Tensor:
        """The token ids of the rows that cross, on the device."""
        ids = self.coding.ids(integers).flatten()
        return self.lane.to_device(ids if index_N is None else ids[index_N])

    # Gradients.

    def _encode_gradient(self, message: Message, gradient: Tensor, after: Mark) -> Coded:
        own, key, fidelity = self._take(message), _key(message), None
        codec = gradient_codec(own.pair.forward, own.pair.backward)
        with self.lane.work(after=after):
            rows_ND = drop_padding(gradient, own.index_N)
            if codec.is_raw:
                return self._on_host(codec, rows_ND, (flat_bytes(rows_ND),))
            is_measured = self._is_measured(key)
            payload = own.coder.encode_gradient(rows_ND, key=key, keeps=is_measured)
            if is_measured:
                arrives = own.coder.decode_gradient(payload, key=key, num_rows=len(rows_ND))
                fidelity = measure(rows_ND, arrives)
            return self._on_host(codec, rows_ND, payload, fidelity)

    def _decode_gradient(self, message: Message, coded: Coded) -> Tensor:
        own = self._take(message)
        codec = gradient_codec(own.pair.forward, own.pair.backward)
        with self.lane.work():
            payload = self._on_device(coded, codec, own)
            if codec.is_raw:
                rows_ND = payload[0].view(coded.dtype).view(own.num_rows, own.shape[-1])
            else:
                rows_ND = own.coder.decode_gradient(payload, key=_key(message), num_rows=own.num_rows)
            # By way of the type that it was coded in, so that both ends have the same numbers.
            rows_ND = rows_ND.to(coded.dtype).to(own.dtype)
            gradient = restore_padding(rows_ND, own.index_N, shape=own.shape)
        return self.lane.hand_over(gradient)

    def _take(self, message: Message) -> _Crossed:
        own = self._awaited.pop((message.step, message.item), None)
        if own is None:
            raise FrameError(f"{message.name} is the gradient of nothing that crossed")
        return own

    # Codecs, from message to message.

    def _switch(self, message: Message) -> tuple[Pair, CodecEnd | None]:
        """The codecs of a message; an evaluation that crosses raw leaves the state of training alone."""
        named = dict(message.codecs)
        texts = named.get(HIDDEN, _RAW[0]), named.get(GRADIENT, _RAW[1])
        if texts == texts_of(self._pair):
            return self._pair, self._end
        pair = read_pair(texts)
        if texts != _RAW or message.kind is not MessageKind.EVALUATION:
            if not self.coding.cut.allows(pair):
                raise FrameError(f"{message.name} is coded by {texts}, which the job does not allow")
            self._pair, self._end = pair, self._make(pair)
        return pair, self._end

    def _make(self, pair: Pair) -> CodecEnd | None:
        if pair == RAW_PAIR:
            return None
        codecs = Codecs(
            forward=pair.forward,
            backward=pair.backward,
            width=self.coding.crossing_width,
            seed=self.coding.seed,
        )
        with self.lane.work():
            return CodecEnd(codecs, device=self.lane.torch_device)

    def _is_measured(self, key: Key) -> bool:
        """Whether to measure this message: its own number says so, so that a resumed run does the same."""
        every = self.coding.cut.guard_every
        return every > 0 and (key.step * self.coding.num_microbatches + key.microbatch) % every == 0

    def _snapshot(self) -> CodecState:
        if self._end is None:
            return CodecState(pair=self._pair, tensors={})
        with self.lane.work():
            state = self._end.state_dict().items()
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state}
        return CodecState(pair=self._pair, tensors=tensors)

    # Rows and bytes.

    def _on_host(
        self, codec: CodecSpec, rows_ND: Tensor, payload: Payload, fidelity: Fidelity | None = None
    ) -> Coded:
        parts = tuple(map(self.lane.to_host, payload))
        return Coded(str(codec), rows_ND.dtype, len(rows_ND), parts, fidelity)

    def _on_device(self, coded: Coded, codec: CodecSpec, due: _Crossed) -> Payload:
        """The parts of a payload on the device, if it is the one that is due."""
        if coded.codec != str(codec):
            raise FrameError(f'what crossed is coded by "{coded.codec}", where "{codec}" is due')
        if coded.num_rows != due.num_rows:
            raise FrameError(f"{coded.num_rows} rows have crossed, where {due.num_rows} are due")
        sizes = [part.numel() for part in coded.parts]
        if codec.is_raw and sizes != [due.num_rows * due.shape[-1] * coded.dtype.itemsize]:
            raise FrameError(f"{due.num_rows} rows of {due.shape[-1]} numbers do not come in {sizes} bytes")
        return tuple(map(self.lane.to_device, coded.parts))


def _key(message: Message) -> Key:
    return Key(step=message.step, microbatch=message.item)
