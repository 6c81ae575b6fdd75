"""The two ends of a cut: activations leave the sending end, gradients come back to it."""

import hashlib
import importlib.util
import shutil
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, CoderSite, Key, Memory, Payload, State, below
from isthmus.codec.feedback import FeedbackCoder
from isthmus.codec.floats import HalfPrecision, Plain
from isthmus.codec.integers import IntegerCoder
from isthmus.codec.rotate import LARGEST_BLOCK, CenterCoder, RotationCoder
from isthmus.codec.subspace import SubspaceCoder, SubspaceGradientCoder
from isthmus.codec.svd import SvdCoder
from isthmus.codec.topk import SameIndicesCoder, TopKCoder
from isthmus.errors import FrameError, UserError
from isthmus.job.codec import CodecSpec, gradient_codec
from isthmus.job.codec_steps import (
    Bf16,
    Center,
    CodecStep,
    CodeState,
    Feedback,
    Fp16,
    Integers,
    Raw,
    Rotate,
    SameBasis,
    SameIndices,
    Subspace,
    Svd,
    TopK,
)

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

    def __init__(self, codec: CodecSpec, codecs: Codecs, place: CoderSite, direction: _Direction) -> None:
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

    def _message(self, key: Key, ids_N: Tensor | None, keeps: bool, learns: bool) -> CodedMessage:
        words = struct.pack("<Qqqq", self._codecs.seed % 2**64, self._direction, key.step, key.microbatch)
        # Neighbouring keys must not give related streams; seeds of generators are below 2**63.
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        return CodedMessage(key=key, seed=seed, ids_N=ids_N, keeps=keeps, learns=learns)

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
        place = CoderSite(width=codecs.width, device=device, memory=self._memory)
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


_KERNEL_DEVICES: Final = ("cuda",)
"""What the kernels were written for."""


def build_coder(steps: tuple[CodecStep, ...], place: CoderSite) -> Coder:
    """The chain of coders that the steps name; each wraps those behind it."""
    match steps:
        case (Subspace() as step, *rest):
            return SubspaceCoder(step, tuple(rest), place, rest=build_coder(tuple(rest), place))
        case (SameBasis(), *rest):
            return SubspaceGradientCoder(memory=place.memory, rest=build_coder(tuple(rest), place))
        case (Center(), *rest):
            return CenterCoder(rest=build_coder(tuple(rest), place))
        case (Feedback(decay=decay), *rest):
            return FeedbackCoder(decay, rest=build_coder(tuple(rest), place))
        case (TopK(ratio=ratio), *rest):
            return TopKCoder(ratio, memory=place.memory, rest=build_coder(tuple(rest), place))
        case (SameIndices(), *rest):
            return SameIndicesCoder(memory=place.memory, rest=build_coder(tuple(rest), place))
        case (Svd(ratio=ratio), *rest):
            return SvdCoder(ratio, rest=build_coder(tuple(rest), place))
    return _build_format(steps, place.device)


def _build_format(steps: tuple[CodecStep, ...], device: torch.device) -> Coder:
    plain = _build_plain(steps)
    match steps:
        case (*before, Integers(bits=8 | 4 as bits, group=int(group), is_stochastic=is_stochastic)) if (
            LARGEST_BLOCK % group == 0 and _compiles_kernels(device)
        ):
            # Triton is there only where an accelerator is.
            from isthmus.codec.kernels import FusedIntegerCoder

            return FusedIntegerCoder(
                bits=bits, group=group, rotates=bool(before), is_stochastic=is_stochastic, plain=plain
            )
    return plain


def _build_plain(steps: tuple[CodecStep, ...]) -> Coder:
    match steps:
        case () | (Raw(),):
            return Plain()
        case (Fp16(),):
            return HalfPrecision(torch.float16)
        case (Bf16(),):
            return HalfPrecision(torch.bfloat16)
        case (Integers() as integers,):
            return IntegerCoder(integers)
        case (Rotate(), *rest):
            return RotationCoder(rest=_build_plain(tuple(rest)))
    raise ValueError(f"no coder for {steps}")


def _compiles_kernels(device: torch.device) -> bool:
    """Whether Triton is here; it needs a C compiler besides its own."""
    return (
        device.type in _KERNEL_DEVICES
        and importlib.util.find_spec("triton") is not None
        and any(shutil.which(compiler) for compiler in ("gcc", "clang"))
    )


def cross(
    x: Tensor,
    *,
    sending: SendingEnd,
    receiving: ReceivingEnd,
    key: Key,
    ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """What arrives of x, of shape (batch, tokens, width) or (rows, width); gradients cross back the same way.

    Rows where the mask is 0 stay behind and arrive as zeros. Nothing is kept where no gradient is wanted.
    """
    keeps = torch.is_grad_enabled() and x.requires_grad
    rows = x.flatten(0, -2) if mask is None else x[mask.bool()]
    ids_N = None if ids is None else (ids.flatten() if mask is None else ids[mask.bool()])
    arrived: Tensor = _Crossing.apply(rows, sending, receiving, key, ids_N, keeps)  # type: ignore[no-untyped-call]
    if mask is None:
        return arrived.view(x.shape)
    return arrived.new_zeros(x.shape).index_put((mask.bool(),), arrived)


class _Crossing(torch.autograd.Function):
    """Forward: decode(encode(x)). Backward: decode_gradient(encode_gradient(g))."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        sending: SendingEnd,
        receiving: ReceivingEnd,
        key: Key,
        ids_N: Tensor | None,
        keeps: bool,
    ) -> Tensor:
        """What the receiving end decodes."""
        ctx.ends = (sending, receiving)
        ctx.key = key
        with _plain_arithmetic(x_ND):
            payload = sending.encode(x_ND, key=key, ids_N=ids_N, keeps=keeps, learns=keeps)
            arrived = receiving.decode(payload, key=key, num_rows=x_ND.shape[0], ids_N=ids_N, keeps=keeps)
        # An autograd function must not hand out a view of what it was given, which raw bytes are.
        return arrived.to(x_ND.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """What the sending end decodes."""
        (g_ND,) = grads
        sending, receiving = ctx.ends
        with _plain_arithmetic(g_ND):
            payload = receiving.encode_gradient(g_ND, key=ctx.key)
            arrived = sending.decode_gradient(payload, key=ctx.key, num_rows=g_ND.shape[0])
        return arrived.to(g_ND.dtype), None, None, None, None, None


def _plain_arithmetic(like: Tensor) -> torch.autocast:
    """Between clouds coders run on threads of their own, where no autocast reaches them."""
    return torch.autocast(like.device.type, enabled=False)
