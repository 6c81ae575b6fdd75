"""The two ends of a cut: activations leave the sending end, gradients come back to it."""

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import Coder, Key, Memory, Message, Payload, Place, State, below
from isthmus.codec.build import build_coder
from isthmus.codec.casts import Plain
from isthmus.errors import FrameError, UserError
from isthmus.job.codec import CodecSpec, gradient_codec
from isthmus.job.codec_sizes import CodeState
from isthmus.job.codec_steps import SameBasis, SameIndices

_STATE_VERSION: Final = 2
_VERSION: Final = "version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """What both ends of a cut agree on; `dtype` is that of elements that cross raw."""

    forward: CodecSpec
    backward: CodecSpec
    width: int
    seed: int = 0
    dtype: torch.dtype = torch.float32


class _Direction(IntEnum):
    FORWARD = 0
    BACKWARD = 1


class _Lane:
    """One direction of a cut at one of its ends: a codec, its coder, and the sizes it admits."""

    def __init__(self, codec: CodecSpec, codecs: Codecs, place: Place, direction: _Direction) -> None:
        self._codec = codec
        self._codecs = codecs
        self._dtype = codecs.dtype if codec.is_raw else torch.float32
        self._direction = direction
        self._coder: Coder = Plain(self._dtype) if codec.is_raw else build_coder(codec.steps, place)

    def encode(self, x_ND: Tensor, key: Key, ids_N: Tensor | None, keeps: bool, learns: bool) -> Payload:
        if x_ND.dim() != 2 or x_ND.shape[1] != self._codecs.width:
            raise ValueError(f"a tensor of shape {tuple(x_ND.shape)} at a cut of width {self._codecs.width}")
        # BLAS adds in another order where a matrix has other strides, and the bytes must not show that.
        rows_ND = x_ND.detach().to(self._dtype).contiguous()
        return self._coder.encode(rows_ND, self._message(key, ids_N, keeps, learns))

    def decode(
        self,
        payload: Payload,
        key: Key,
        num_rows: int,
        ids_N: Tensor | None,
        keeps: bool,
    ) -> Tensor:
        self._check(payload, num_rows)
        message = self._message(key, ids_N, keeps, learns=keeps)
        return self._coder.decode(iter(payload), (num_rows, self._codecs.width), message)

    def state_dict(self, prefix: str) -> State:
        return {prefix + name: tensor for name, tensor in self._coder.state_dict().items()}

    def load_state_dict(self, prefix: str, state: State) -> None:
        self._coder.load_state_dict(below(prefix, state))

    def _message(self, key: Key, ids_N: Tensor | None, keeps: bool, learns: bool) -> Message:
        words = struct.pack("<Qqqq", self._codecs.seed % 2**64, self._direction, key.step, key.microbatch)
        # Neighbouring keys must not give related streams; seeds of generators are below 2**63.
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        return Message(key=key, seed=seed, ids_N=ids_N, keeps=keeps, learns=learns)

    def _check(self, payload: Payload, num_rows: int) -> None:
        if any(part.dtype is not torch.uint8 or part.dim() != 1 for part in payload):
            raise FrameError("a payload of other things than bytes")
        sizes = tuple(part.numel() for part in payload)
        if not any(sizes == self._sizes(num_rows, state) for state in CodeState):
            raise FrameError(
                f'{num_rows} rows of width {self._codecs.width} by "{self._codec}" in parts of {sizes} bytes '
                f"instead of {self._sizes(num_rows, CodeState.STEADY)}"
            )

    def _sizes(self, num_rows: int, state: CodeState) -> tuple[int, ...]:
        return self._codec.part_bytes(
            num_rows, self._codecs.width, state=state, element_bytes=self._codecs.dtype.itemsize
        )


class _End:
    """What the ends have in common: a coder for activations, one for gradients, and their state."""

    def __init__(self, codecs: Codecs, *, device: torch.device) -> None:
        gradient = gradient_codec(codecs.forward, codecs.backward)
        follows = any(isinstance(step, SameBasis | SameIndices) for step in gradient.steps)
        self._memory = Memory(is_asked=follows)
        place = Place(width=codecs.width, device=device, memory=self._memory)
        self._forward = _Lane(codecs.forward, codecs, place, _Direction.FORWARD)
        self._backward = _Lane(gradient, codecs, place, _Direction.BACKWARD)

    def state_dict(self) -> State:
        """Everything that the next message depends on; nothing may be in flight."""
        version = {_VERSION: torch.tensor(_STATE_VERSION)}
        return version | self._forward.state_dict("forward.") | self._backward.state_dict("backward.")

    def load_state_dict(self, state: State) -> None:
        """Continue bit for bit from where the state was taken."""
        version = state.get(_VERSION)
        number = None if version is None else int(version)
        if number != _STATE_VERSION:
            raise UserError(
                f"the checkpoint's codec state has version {number}, and this release reads {_STATE_VERSION}",
                hint="resume with the release that wrote the checkpoint",
            )
        self._forward.load_state_dict("forward.", state)
        self._backward.load_state_dict("backward.", state)


class SendingEnd(_End):
    """The end at the stage before a cut."""

    def encode(
        self,
        x_ND: Tensor,
        *,
        key: Key,
        ids_N: Tensor | None = None,
        keeps: bool = True,
        learns: bool = True,
    ) -> Payload:
        """The payload of an activation.

        `keeps` is false where no gradient will come, `learns` in evaluation, on which nothing may depend.
        """
        return self._forward.encode(x_ND, key, ids_N, keeps, learns)

    def preview(
        self,
        payload: Payload,
        *,
        key: Key,
        num_rows: int,
        ids_N: Tensor | None = None,
    ) -> Tensor:
        """What the receiver will decode from the payload just encoded."""
        return self._forward.decode(payload, key, num_rows, ids_N, False)

    def decode_gradient(self, payload: Payload, *, key: Key, num_rows: int) -> Tensor:
        """The float32 gradient of the activation of this key, of shape (rows, width)."""
        g_ND = self._backward.decode(payload, key, num_rows, None, True)
        self._memory.forget(key)
        return g_ND


class ReceivingEnd(_End):
    """The end at the stage behind a cut."""

    def decode(
        self,
        payload: Payload,
        *,
        key: Key,
        num_rows: int,
        ids_N: Tensor | None = None,
        keeps: bool = True,
    ) -> Tensor:
        """The float32 activation, of shape (rows, width)."""
        return self._forward.decode(payload, key, num_rows, ids_N, keeps)

    def encode_gradient(self, g_ND: Tensor, *, key: Key, keeps: bool = False) -> Payload:
        """The payload of the gradient of what was decoded under this key; `keeps` for a preview."""
        payload = self._backward.encode(g_ND, key, None, True, True)
        if not keeps:
            self._memory.forget(key)
        return payload

    def preview_gradient(self, payload: Payload, *, key: Key, num_rows: int) -> Tensor:
        """What the sending end will decode from the payload just encoded."""
        g_ND = self._backward.decode(payload, key, num_rows, None, False)
        self._memory.forget(key)
        return g_ND


def sending_end(codecs: Codecs, *, device: torch.device) -> SendingEnd:
    """The end of a cut that activations leave from."""
    return SendingEnd(codecs, device=device)


def receiving_end(codecs: Codecs, *, device: torch.device) -> ReceivingEnd:
    """The end of a cut that activations arrive at."""
    return ReceivingEnd(codecs, device=device)
