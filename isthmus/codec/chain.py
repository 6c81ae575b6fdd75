"""The ends of a cut: activations leave the sender's end, gradients come back to it."""

import hashlib
import importlib.util
import math
import shutil
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, CoderSite, Key, Memory, Payload, State
from isthmus.codec.formats import FloatCoder, IntegerCoder
from isthmus.codec.low_rank import SubspaceCoder
from isthmus.codec.transforms import (
    LARGEST_BLOCK,
    CenterCoder,
    FeedbackCoder,
    FollowingCoder,
    RotationCoder,
    SvdCoder,
    TopKCoder,
)
from isthmus.errors import FrameError, UserError
from isthmus.job import codec_steps as named
from isthmus.job.codec import CodecSpec, gradient_codec

_STATE_VERSION: Final = 2
_VERSION: Final = "version"
_KERNEL_DEVICES: Final = ("cuda",)
"""The devices for which the kernels were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """What both ends of a cut agree on."""

    forward: CodecSpec
    backward: CodecSpec
    width: int
    seed: int = 0


class _Direction(IntEnum):
    FORWARD = 0
    BACKWARD = 1


class _Lane:
    """One direction of a cut at one of its ends: a codec, its coder, and the sizes it admits."""

    def __init__(self, codec: CodecSpec, codecs: Codecs, site: CoderSite, direction: _Direction) -> None:
        self._codec = codec
        self._codecs = codecs
        self._direction = direction
        self.coder = build_coder(codec.steps, site)

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        if x_ND.dim() != 2 or x_ND.shape[1] != self._codecs.width:
            raise ValueError(f"a tensor of shape {tuple(x_ND.shape)} at a cut of width {self._codecs.width}")
        # BLAS adds in another order where a matrix has other strides, and the bytes must not show that.
        return self.coder.encode(x_ND.detach().float().contiguous(), message)

    def decode(self, payload: Payload, num_rows: int, message: CodedMessage) -> Tensor:
        if any(part.dtype is not torch.uint8 or part.dim() != 1 for part in payload):
            raise FrameError("a payload of other things than bytes")
        sizes, width = tuple(part.numel() for part in payload), self._codecs.width
        due = {state: self._codec.part_bytes(num_rows, width, state=state) for state in named.CodeState}
        if sizes not in due.values():
            raise FrameError(
                f'{num_rows} rows of width {width} by "{self._codec}" in parts of {sizes} bytes '
                f"instead of {due[named.CodeState.STEADY]}"
            )
        return self.coder.decode(iter(payload), (num_rows, width), message)

    def message(
        self, key: Key, *, ids_N: Tensor | None = None, keeps: bool = True, learns: bool = True
    ) -> CodedMessage:
        words = struct.pack("<Qqqq", self._codecs.seed % 2**64, self._direction, key.step, key.microbatch)
        # Neighbouring keys must not give related streams; seeds of generators are below 2**63.
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        return CodedMessage(key=key, seed=seed, ids_N=ids_N, keeps=keeps, learns=learns)


class CodecEnd:
    """One end of a cut, with a coder for activations and one for gradients.

    The stage before the cut encodes activations and decodes gradients, the stage behind it the other way
    round. A sender may decode what it has encoded, to see what arrives, with `keeps` false for activations.
    """

    def __init__(self, codecs: Codecs, *, device: torch.device) -> None:
        gradient = gradient_codec(codecs.forward, codecs.backward)
        follows = any(isinstance(step, named.SameBasis | named.SameIndices) for step in gradient.steps)
        self._memory = Memory(is_asked=follows)
        site = CoderSite(width=codecs.width, device=device, memory=self._memory)
        self._forward = _Lane(codecs.forward, codecs, site, _Direction.FORWARD)
        self._backward = _Lane(gradient, codecs, site, _Direction.BACKWARD)

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
        message = self._forward.message(key, ids_N=ids_N, keeps=keeps, learns=learns)
        return self._forward.encode(x_ND, message)

    def decode(
        self, payload: Payload, *, key: Key, num_rows: int, ids_N: Tensor | None = None, keeps: bool = True
    ) -> Tensor:
        """The float32 activation, of shape (rows, width)."""
        message = self._forward.message(key, ids_N=ids_N, keeps=keeps, learns=keeps)
        return self._forward.decode(payload, num_rows, message)

    def encode_gradient(self, g_ND: Tensor, *, key: Key, keeps: bool = False) -> Payload:
        """The payload of the gradient of what was decoded under this key; `keeps` to decode it here, too."""
        payload = self._backward.encode(g_ND, self._backward.message(key))
        if not keeps:
            self._memory.forget(key)
        return payload

    def decode_gradient(self, payload: Payload, *, key: Key, num_rows: int) -> Tensor:
        """The float32 gradient of the activation of this key, of shape (rows, width)."""
        g_ND = self._backward.decode(payload, num_rows, self._backward.message(key))
        self._memory.forget(key)
        return g_ND

    def state_dict(self) -> State:
        """Everything that the next message depends on; nothing may be in flight."""
        forward = {f"forward.{name}": one for name, one in self._forward.coder.state_dict().items()}
        backward = {f"backward.{name}": one for name, one in self._backward.coder.state_dict().items()}
        return {_VERSION: torch.tensor(_STATE_VERSION)} | forward | backward

    def load_state_dict(self, state: State) -> None:
        """Continue bit for bit from where the state was taken."""
        version = state.get(_VERSION)
        number = None if version is None else int(version)
        if number != _STATE_VERSION:
            raise UserError(
                f"the checkpoint's codec state has version {number}, and this release reads {_STATE_VERSION}",
                hint="resume with the release that wrote the checkpoint",
            )
        for prefix, lane in (("forward.", self._forward), ("backward.", self._backward)):
            own = {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}
            lane.coder.load_state_dict(own)


def build_coder(steps: tuple[named.CodecStep, ...], site: CoderSite) -> Coder:
    """The chain of coders that the steps name; each wraps those behind it."""
    if not steps or isinstance(steps[0], named.Rotate | named.Format):
        return _build_format(steps, site.device)
    is_in_subspace = isinstance(steps[0], named.Subspace | named.SameBasis)
    rest = build_coder(named.in_subspace(steps[1:]) if is_in_subspace else steps[1:], site)
    match steps[0]:
        case named.Subspace() as step:
            return SubspaceCoder(step, site, rest=rest)
        case named.SameBasis() | named.SameIndices():
            return FollowingCoder(memory=site.memory, rest=rest)
        case named.Center():
            return CenterCoder(rest=rest)
        case named.Feedback(decay=decay):
            return FeedbackCoder(decay, rest=rest)
        case named.TopK(ratio=ratio):
            return TopKCoder(ratio, memory=site.memory, rest=rest)
        case named.Svd(ratio=ratio):
            return SvdCoder(ratio, rest=rest)
    raise ValueError(f"no coder for {steps}")


def _build_format(steps: tuple[named.CodecStep, ...], device: torch.device) -> Coder:
    match steps:
        case () | (named.Raw(),):
            return FloatCoder()
        case (named.Fp16(),):
            return FloatCoder(torch.float16)
        case (named.Bf16(),):
            return FloatCoder(torch.bfloat16)
        case (*before, named.Integers() as integers):
            plain: Coder = IntegerCoder(integers)
            if before:
                plain = RotationCoder(rest=plain)
            return _fused(integers, plain, rotates=bool(before)) if _compiles_kernels(device) else plain
    raise ValueError(f"no coder for {steps}")


def _fused(integers: named.Integers, plain: Coder, *, rotates: bool) -> Coder:
    if integers.bits == 2 or integers.group is None or LARGEST_BLOCK % integers.group:
        return plain
    # Triton is there only where an accelerator is.
    from isthmus.codec.kernels import FusedIntegerCoder

    return FusedIntegerCoder(integers, group=integers.group, rotates=rotates, plain=plain)


def _compiles_kernels(device: torch.device) -> bool:
    """Whether Triton is here; it needs a C compiler besides its own."""
    return (
        device.type in _KERNEL_DEVICES
        and importlib.util.find_spec("triton") is not None
        and any(shutil.which(compiler) for compiler in ("gcc", "clang"))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How far what arrives is from what was sent: |sent − arrives| / |sent|, and the cosine between them."""

    relative_error: float
    cosine: float


def measure(sent_ND: Tensor, arrives_ND: Tensor) -> Fidelity:
    """Compare two matrices over the rows that were finite when sent; equal where there are none."""
    sent, arrives = sent_ND.double(), arrives_ND.double()
    is_finite = sent.isfinite().all(dim=1, keepdim=True)
    sent, arrives = torch.where(is_finite, sent, 0), torch.where(is_finite, arrives, 0)
    sums = torch.stack([one.sum() for one in (sent**2, arrives**2, sent * arrives, (sent - arrives) ** 2)])
    # One transfer, so that a device is waited for once.
    sent_sum, arrives_sum, product, lost = sums.tolist()
    if lost == 0:
        return Fidelity(relative_error=0.0, cosine=1.0)
    if not math.isfinite(lost):
        return Fidelity(relative_error=math.inf, cosine=0.0)
    norms = math.sqrt(sent_sum) * math.sqrt(arrives_sum)
    return Fidelity(
        relative_error=math.sqrt(lost / sent_sum) if sent_sum else math.inf,
        cosine=product / norms if norms else 0.0,
    )
