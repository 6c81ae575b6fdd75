"""From the steps of a codec to the coders that carry them out."""

import importlib.util
import shutil
from typing import Final

import torch

from isthmus.codec.base import Coder, Place
from isthmus.codec.casts import Half, Plain
from isthmus.codec.center import CenterCoder
from isthmus.codec.feedback import FeedbackCoder
from isthmus.codec.integers import IntegerCoder
from isthmus.codec.rotation import LARGEST_BLOCK, RotationCoder
from isthmus.codec.subspace import SubspaceCoder, SubspaceGradientCoder
from isthmus.codec.svd import SvdCoder
from isthmus.codec.topk import SameIndicesCoder, TopKCoder
from isthmus.job.codec_steps import (
    Bf16,
    Center,
    CodecStep,
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

_KERNEL_DEVICES: Final = ("cuda",)
"""What the kernels were written for."""


def build_coder(steps: tuple[CodecStep, ...], place: Place) -> Coder:
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
            from isthmus.codec.fused import FusedIntegerCoder

            return FusedIntegerCoder(
                bits=bits, group=group, rotates=bool(before), is_stochastic=is_stochastic, plain=plain
            )
    return plain


def _build_plain(steps: tuple[CodecStep, ...]) -> Coder:
    match steps:
        case () | (Raw(),):
            return Plain()
        case (Fp16(),):
            return Half(torch.float16)
        case (Bf16(),):
            return Half(torch.bfloat16)
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
