"""From the steps of a codec to the coders that carry them out."""

import torch

from isthmus.codec.base import Coder, Place
from isthmus.codec.casts import Half, Plain
from isthmus.codec.center import CenterCoder
from isthmus.codec.feedback import FeedbackCoder
from isthmus.codec.integers import IntegerCoder
from isthmus.codec.rotation import RotationCoder
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
    return _build_format(steps)


def _build_format(steps: tuple[CodecStep, ...]) -> Coder:
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
            return RotationCoder(rest=_build_format(tuple(rest)))
    raise ValueError(f"no coder for {steps}")
