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
from isthmus.plan.codecs import RAW, RAW_PAIR, Pair, read_pair, texts_of
from isthmus.plan.end_of_step import Texts
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

    hidden_width: int
    crossing_width: int
    """Elements per token that cross once a bottleneck has started."""
    num_warmup_steps: int = 0
    seed: int = 0
    guard_every: int = 0
    num_microbatches: int = 1
    returns_gradients: bool = True
    """Whether gradients come back over this cut: not to frozen stages."""
    may_omit: bool = False
    """Whether a micro-batch may cross without hidden states: between frozen stages, where a cache behind them
    holds all of it."""
    max_rows: int | None = None
    """The most tokens of a micro-batch, with its padding; None where that is not agreed on."""
    rows: RowRule
    ids: Callable[[Integers], Tensor] = lambda integers: integers[IDS]
    """The token ids of the hidden states, of shape (batch, tokens)."""
    allows: Callable[[Pair], bool] = lambda _: True


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecState:
    """The codecs of a cut at the start of a step, and their state at one end, on the host."""

    pair: Pair
    tensors: Mapping[str, Tensor]


class _Pending(NamedTuple):
    """An activation whose gradient is still to come, or to go."""

    index_N: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: CodecSpec
    """That of the gradient, less what the activation has settled for both directions."""
    end: CodecEnd | None
    num_rows: int


@dataclass(slots=True)
class CutEnd:
    """One end of a cut between this member and one other; encoding and decoding have a thread each."""

    coding: CutCoding
    device: Device
    is_sender: bool
    cache: Cache | None = None
    """At the first trained stage behind frozen ones."""
    lane: SideStream = field(init=False)
    _texts: Texts = _RAW
    """The codecs of activations and of gradients that the codec state is for."""
    _end: CodecEnd | None = None
    _pending: dict[tuple[int, int], _Pending] = field(default_factory=dict)
    _step: int = -1
    _at_start: CodecState | None = None

    def __post_init__(self) -> None:
        self.lane = self.device.side_stream()

    def encode(self, message: Message, hidden: Tensor, integers: Integers, *, after: Mark) -> Coded:
        """Hidden states, or their gradient, as bytes on the host, which are there when this returns."""
        if message.kind is MessageKind.GRADIENT:
            return self._encode_gradient(message, hidden, after)
        end = self._switch(message)
        index = self.coding.rows(integers)
        is_training = message.kind is MessageKind.ACTIVATION
        keeps = is_training and self.coding.returns_gradients
        if keeps:
            self._keep(message, index, tuple(hidden.shape), hidden.dtype, end)
        codec = self._forward_codec(message)
        fidelity: list[Fidelity] = []

        def encode(rows_ND: Tensor) -> Payload:
            key, ids = _key(message), self._ids(integers, index)
            coder = _present(end)
            payload = coder.encode(rows_ND, key=key, ids_N=ids, keeps=keeps, learns=is_training)
            if is_training and self._is_measured(key):
                arrives = coder.decode(payload, key=key, num_rows=len(rows_ND), ids_N=ids, keeps=False)
                fidelity.append(measure(rows_ND, arrives))
            return payload

        with self.lane.work(after=after):
            coded = self._code(drop_padding(hidden, index), codec, encode)
        return _measured(coded, fidelity)

    def decode(self, message: Message, coded: Coded | None, integers: Integers) -> Tensor | None:
        """Hidden states of shape (batch, tokens, width), or their gradient, on the device.

        Nothing is coded where the cache of frozen layers holds every sequence of a micro-batch: the first
        trained stage takes all of it from there, and frozen stages before it get None.
        """
        is_gradient = message.kind is MessageKind.GRADIENT
        if is_gradient is not self.is_sender:
            raise FrameError(f"{message.name} has come from the wrong side of a cut")
        if not is_gradient:
            self._check_ids(message, integers)
        hidden = None
        if coded is not None:
            decode = self._decode_gradient if is_gradient else self._decode_activation
            hidden = decode(message, coded, integers)
        if self.cache is not None and HELD in integers:
            return self.cache.complete(hidden, integers, self.lane)
        if hidden is None and not (self.coding.may_omit and _is_held(integers)):
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

    def _check_ids(self, message: Message, integers: Integers) -> None:
        """Refuse more tokens than a micro-batch of the job has, before memory is taken for them."""
        if IDS not in integers or integers[IDS].ndim != 2:
            raise FrameError(f"{message.name} without token ids")
        num_tokens = max(integers[IDS].numel(), self.coding.ids(integers).numel())
        if self.coding.max_rows is not None and num_tokens > self.coding.max_rows:
            most = self.coding.max_rows
            raise FrameError(f"{message.name} of {num_tokens} tokens, where {most} are the most")

    def _decode_activation(self, message: Message, coded: Coded, integers: Integers) -> Tensor:
        self._note_start(message.step)
        end = self._switch(message)
        index = self.coding.rows(integers)
        ids_BT = self.coding.ids(integers)
        num_rows = ids_BT.numel() if index is None else len(index)
        is_training = message.kind is MessageKind.ACTIVATION
        keeps = is_training and self.coding.returns_gradients
        width = self._width(message)
        shape = (*ids_BT.shape, width)
        if keeps:
            self._keep(message, index, shape, coded.dtype, end)

        def decode(payload: Payload) -> Tensor:
            ids = self._ids(integers, index)
            return _present(end).decode(payload, key=_key(message), num_rows=num_rows, ids_N=ids, keeps=keeps)

        with self.lane.work():
            rows = self._rows(coded, self._forward_codec(message), decode, num_rows=num_rows, width=width)
            hidden = restore_padding(rows, index, shape=shape)
        return self.lane.hand_over(hidden)

    def state(self, step: int) -> CodecState:
        """What the first message of a step depends on; all messages of the step before have been coded."""
        if self._at_start is not None and self._step >= step:
            return self._at_start
        return self._snapshot()

    def load(self, state: CodecState) -> None:
        """Continue as from the state that was taken."""
        self._texts, self._end = texts_of(state.pair), self._make(state.pair)
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

    # Gradients.

    def _encode_gradient(self, message: Message, gradient: Tensor, after: Mark) -> Coded:
        kept = self._take(message)
        fidelity: list[Fidelity] = []

        def encode(rows_ND: Tensor) -> Payload:
            key, end = _key(message), _present(kept.end)
            is_measured = self._is_measured(key)
            payload = end.encode_gradient(rows_ND, key=key, keeps=is_measured)
            if is_measured:
                arrives = end.decode_gradient(payload, key=key, num_rows=len(rows_ND))
                fidelity.append(measure(rows_ND, arrives))
            return payload

        with self.lane.work(after=after):
            coded = self._code(drop_padding(gradient, kept.index_N), kept.codec, encode)
        return _measured(coded, fidelity)

    def _decode_gradient(self, message: Message, coded: Coded, _integers: Integers) -> Tensor:
        kept = self._take(message)

        def decode(payload: Payload) -> Tensor:
            return _present(kept.end).decode_gradient(payload, key=_key(message), num_rows=kept.num_rows)

        with self.lane.work():
            rows = self._rows(coded, kept.codec, decode, num_rows=kept.num_rows, width=kept.shape[-1])
            gradient = restore_padding(rows.to(kept.dtype), kept.index_N, shape=kept.shape)
        return self.lane.hand_over(gradient)

    def _keep(
        self,
        message: Message,
        index: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        end: CodecEnd | None,
    ) -> None:
        num_rows = math.prod(shape[:-1]) if index is None else len(index)
        texts = _texts_of(message)
        pair = RAW_PAIR if texts == _RAW else read_pair(texts)
        codec = RAW if texts == _RAW else gradient_codec(pair.forward, pair.backward)
        kept = _Pending(index, shape, dtype, codec, end, num_rows)
        self._pending[message.step, message.item] = kept

    def _take(self, message: Message) -> _Pending:
        kept = self._pending.pop((message.step, message.item), None)
        if kept is None:
            raise FrameError(f"{message.name} is the gradient of nothing that crossed")
        return kept

    # Codecs, from message to message.

    def _switch(self, message: Message) -> CodecEnd | None:
        """The codec state for a message; an evaluation that crosses raw leaves that of training alone."""
        texts = _texts_of(message)
        if texts != self._texts and not (texts == _RAW and message.kind is MessageKind.EVALUATION):
            pair = read_pair(texts)
            if not self.coding.allows(pair):
                raise FrameError(f"{message.name} is coded by {texts}, which the job does not allow")
            self._texts, self._end = texts_of(pair), self._make(pair)
        return self._end

    def _make(self, pair: Pair) -> CodecEnd | None:
        if texts_of(pair) == _RAW:
            return None
        coding = self.coding
        codecs = Codecs(
            forward=pair.forward, backward=pair.backward, width=coding.crossing_width, seed=coding.seed
        )
        with self.lane.work():
            return CodecEnd(codecs, device=self.lane.torch_device)

    def _is_measured(self, key: Key) -> bool:
        """Whether to measure this message: its own number says so, so that a resumed run does the same."""
        every, number = self.coding.guard_every, key.step * self.coding.num_microbatches + key.microbatch
        return every > 0 and number % every == 0

    def _forward_codec(self, message: Message) -> CodecSpec:
        texts = _texts_of(message)
        return RAW if texts == _RAW else read_pair(texts).forward

    def _width(self, message: Message) -> int:
        is_warm = message.step >= self.coding.num_warmup_steps
        return self.coding.crossing_width if is_warm else self.coding.hidden_width

    def _note_start(self, step: int) -> None:
        """Take the state with which a step starts before its first message changes it."""
        if step > self._step:
            self._step, self._at_start = step, self._snapshot()

    def _snapshot(self) -> CodecState:
        if self._end is None:
            return CodecState(pair=read_pair(self._texts), tensors={})
        with self.lane.work():
            state = self._end.state_dict().items()
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state}
        return CodecState(pair=read_pair(self._texts), tensors=tensors)

    # Rows and bytes.

    def _code(self, rows_ND: Tensor, codec: CodecSpec, encode: Callable[[Tensor], Payload]) -> Coded:
        parts = (flat_bytes(rows_ND),) if codec.is_raw else encode(rows_ND)
        return Coded(str(codec), rows_ND.dtype, len(rows_ND), tuple(map(self.lane.to_host, parts)))

    def _rows(
        self,
        coded: Coded,
        codec: CodecSpec,
        decode: Callable[[Payload], Tensor],
        *,
        num_rows: int,
        width: int,
    ) -> Tensor:
        """Rows on the device from bytes on the host, of the type that they had."""
        if coded.codec != str(codec):
            raise FrameError(f'what crossed is coded by "{coded.codec}", where "{codec}" is due')
        if coded.num_rows != num_rows:
            raise FrameError(f"{coded.num_rows} rows have crossed, where {num_rows} are due")
        if codec.is_raw:
            return self.lane.to_device(_raw_rows(coded, width=width))
        return decode(tuple(map(self.lane.to_device, coded.parts))).to(coded.dtype)

    def _ids(self, integers: Integers, index_N: Tensor | None) -> Tensor:
        """The token ids of the rows that cross, on the device."""
        ids = self.coding.ids(integers).flatten()
        return self.lane.to_device(ids if index_N is None else ids[index_N])


def _present(end: CodecEnd | None) -> CodecEnd:
    if end is None:
        raise FrameError("a message is coded at a cut that has no codecs")
    return end


def _raw_rows(coded: Coded, *, width: int) -> Tensor:
    """The rows that crossed as they are; a view of the bytes."""
    sizes = [part.numel() for part in coded.parts]
    if sizes != [coded.num_rows * width * coded.dtype.itemsize]:
        raise FrameError(f"{coded.num_rows} rows of {width} numbers do not come in parts of {sizes} bytes")
    return coded.parts[0].view(coded.dtype).view(coded.num_rows, width)


def _texts_of(message: Message) -> Texts:
    codecs = dict(message.codecs)
    return codecs.get(HIDDEN, _RAW[0]), codecs.get(GRADIENT, _RAW[1])


def _is_held(integers: Integers) -> bool:
    return HELD in integers and len(held_of(integers) or ()) == len(integers[IDS])


def _measured(coded: Coded, fidelity: list[Fidelity]) -> Coded:
    return coded._replace(fidelity=fidelity[0]) if fidelity else coded


def _key(message: Message) -> Key:
    return Key(step=message.step, microbatch=message.item)
