# Triton has no types, and reads annotations itself.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Rotation and integers in one pass over the elements, for accelerators that Triton compiles for.

The bytes are those of `formats.py`, but for stochastic rounding, whose noise is drawn otherwise. A program
takes some rows of one block of 256 columns; with 4 bits also of the block half a row behind it, since a byte
holds an element of each. Shapes: R rows of a program, B elements of a block, G groups of a block, E elements
of a group, W draws of random words.
"""

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, Payload, flat_bytes, from_bytes
from isthmus.codec.formats import HEADROOM, LEAST_SCALE
from isthmus.codec.transforms import Signs
from isthmus.job.codec_steps import Integers

BLOCK: Final = 256
"""The elements that are rotated together: the largest block of `transforms.py`."""

_BLOCK: Final = tl.constexpr(BLOCK)
_HEADROOM: Final = tl.constexpr(HEADROOM)
_LEAST_SCALE: Final = tl.constexpr(LEAST_SCALE)
_NOT_FINITE: Final = tl.constexpr(0x7F800000)
"""The bits of Inf; those of NaN, without the sign, are larger."""

_ROUNDER: Final = tl.constexpr(1.5 * 2**23)
"""Floats of this size have no fraction: to add it and take it off again rounds, ties to even."""

_NUM_PHILOX_ROUNDS: Final = tl.constexpr(7)
"""The fewest that pass BigCrush: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""


@triton.jit(do_not_specialize=["num_rows", "seed"])
def encode_kernel(
    x_ptr, signs_ptr, scales_ptr, codes_ptr, num_rows, width, seed,
    BITS: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The bits of bf16 scales and packed codes of x, of shape (num_rows, width).

    Without signs, one per column, nothing is rotated; without a seed codes are rounded to the nearest.
    """
    NUM_LANES: tl.constexpr = 8 // BITS
    NUM_GROUPS: tl.constexpr = _BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64) * R
    row_R1 = tl.arange(0, R)[:, None]
    column_1B = tl.arange(0, _BLOCK)[None, :]
    is_row_R1 = row_R1 < num_rows - row
    packed_RB = tl.zeros((R, _BLOCK), tl.int32)
    for lane in tl.static_range(NUM_LANES):
        column = lane * (width // NUM_LANES) + tl.program_id(1) * _BLOCK
        x_RB = tl.load(x_ptr + row * width + column + row_R1 * width + column_1B, mask=is_row_R1, other=0.0)
        x_RB = x_RB.to(tl.float32)
        if signs_ptr is not None:
            x_RB = _rotated(x_RB * tl.load(signs_ptr + column + column_1B), R)
        x_RGE = tl.reshape(x_RB, (R, NUM_GROUPS, GROUP))
        bits_RG = _scales(x_RGE, 2 ** (BITS - 1) - 1)
        first = row * (width // GROUP) + column // GROUP
        place_RG = row_R1 * (width // GROUP) + tl.arange(0, NUM_GROUPS)[None, :]
        tl.store(scales_ptr + first + place_RG, (bits_RG >> 16).to(tl.int16), mask=is_row_R1)
        scale_RG = bits_RG.to(tl.float32, bitcast=True)
        codes_RGE = x_RGE * tl.div_rn(1.0, scale_RG)[:, :, None]
        if seed is not None:
            noise_RB = _noise(seed, row * width + column, row_R1 * width, R)
            codes_RGE += tl.reshape(noise_RB, (R, NUM_GROUPS, GROUP))
        codes_RGE = _marked(codes_RGE + _ROUNDER - _ROUNDER, x_RGE, scale_RG[:, :, None])
        packed_RB += tl.reshape(codes_RGE, (R, _BLOCK)).to(tl.int32) << (lane * BITS)
    stride = width // NUM_LANES
    codes_ptr += row * stride + tl.program_id(1) * _BLOCK
    tl.store(codes_ptr + row_R1 * stride + column_1B, packed_RB.to(tl.int8), mask=is_row_R1)


@triton.jit(do_not_specialize=["num_rows"])
def decode_kernel(
    scales_ptr, codes_ptr, signs_ptr, x_ptr, num_rows, width,
    BITS: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The matrix x of shape (num_rows, width), from the bits of its scales and its codes."""
    NUM_LANES: tl.constexpr = 8 // BITS
    NUM_GROUPS: tl.constexpr = _BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64) * R
    row_R1 = tl.arange(0, R)[:, None]
    column_1B = tl.arange(0, _BLOCK)[None, :]
    is_row_R1 = row_R1 < num_rows - row
    stride = width // NUM_LANES
    codes_ptr += row * stride + tl.program_id(1) * _BLOCK
    packed_RB = tl.load(codes_ptr + row_R1 * stride + column_1B, mask=is_row_R1, other=0).to(tl.int32)
    for lane in tl.static_range(NUM_LANES):
        column = lane * stride + tl.program_id(1) * _BLOCK
        codes_RB = packed_RB
        if BITS == 4:
            # A byte is low + 16 * high with both from -8 to 7; 8 more make the low one a plain remainder.
            codes_RB = ((packed_RB + 8) & 15) - 8 if lane == 0 else (packed_RB + 8) << 24 >> 28
        first = row * (width // GROUP) + column // GROUP
        place_RG = row_R1 * (width // GROUP) + tl.arange(0, NUM_GROUPS)[None, :]
        bits_RG = tl.load(scales_ptr + first + place_RG, mask=is_row_R1, other=0).to(tl.int32) << 16
        scale_RG = bits_RG.to(tl.float32, bitcast=True)
        codes_RGE = tl.reshape(codes_RB, (R, NUM_GROUPS, GROUP))
        x_RB = tl.reshape(_values(codes_RGE, scale_RG[:, :, None]), (R, _BLOCK))
        if signs_ptr is not None:
            x_RB = _rotated(x_RB, R) * tl.load(signs_ptr + column + column_1B)
        tl.store(x_ptr + row * width + column + row_R1 * width + column_1B, x_RB, mask=is_row_R1)


@triton.jit
def _rotated(x_RB, R: tl.constexpr):
    """Each row times H(256), which is a sum and a difference along each of the eight bits of the column."""
    x_RB *= 0.0625  # First, so that no sum overflows that the rotation itself does not.
    for _ in tl.static_range(8):
        # The lowest bit is taken off the end and put on top: after eight turns all are in place again.
        even, odd = tl.split(tl.reshape(x_RB, (R, _BLOCK // 2, 2)))
        x_RB = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (R, _BLOCK))
    return x_RB


@triton.jit
def _scales(x_RGE, LAST: tl.constexpr):
    """The bits of the distance of two levels of each group; NaN where the group is not finite."""
    # Bits without the sign have the order of floats, with NaN last: a maximum of floats would lose it.
    bits_RG = tl.max(x_RGE.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    scale_RG = tl.maximum(bits_RG.to(tl.float32, bitcast=True) * (_HEADROOM / LAST), _LEAST_SCALE)
    bits_RG = tl.where(bits_RG < _NOT_FINITE, scale_RG, float("nan")).to(tl.int32, bitcast=True)
    # To the nearest bf16, ties to even; by hand, since the casts of Triton's interpreter are not exact.
    return (bits_RG + 0x7FFF + (bits_RG >> 16 & 1)) & -0x10000


@triton.jit
def _noise(seed, first, row_R1, R: tl.constexpr):
    """Multiples of 2^-16 from -1/2 to just below 1/2, eight to a draw, by the place of the element."""
    place_RW = (first // 8).to(tl.uint32) + (row_R1 // 8 + tl.arange(0, _BLOCK // 8)[None, :]).to(tl.uint32)
    a, b, c, d = tl.randint4x(seed, place_RW, _NUM_PHILOX_ROUNDS)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.int32, bitcast=True)
    return tl.reshape(tl.join(words >> 16, (words << 16) >> 16), (R, _BLOCK)).to(tl.float32) * 2**-16


@triton.jit
def _marked(codes_RGE, x_RGE, scale_RG1):
    """Codes, but in groups that are not finite the marks of what stood where."""
    size_RGE = x_RGE.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    infinity_RGE = tl.where(x_RGE > 0, 2.0, 3.0)
    marks_RGE = tl.where(size_RGE > _NOT_FINITE, 1.0, tl.where(size_RGE == _NOT_FINITE, infinity_RGE, 0.0))
    return tl.where(scale_RG1 == scale_RG1, codes_RGE, marks_RGE)


@triton.jit
def _values(codes_RGE, scale_RG1):
    """Codes times scales, but in groups that are not finite what the marks say."""
    infinity_RGE = tl.where(codes_RGE == 2, float("inf"), tl.where(codes_RGE == 3, float("-inf"), 0.0))
    marked_RGE = tl.where(codes_RGE == 1, float("nan"), infinity_RGE)
    return tl.where(scale_RG1 == scale_RG1, codes_RGE.to(tl.float32) * scale_RG1, marked_RGE)


_PROGRAM_ELEMENTS: Final = 1024
_NUM_WARPS: Final = 1
"""A program is small enough that one warp holds it in registers, and never waits for another."""


class FusedIntegerCoder(Coder):
    """Codes of 8 or 4 bits in groups that divide a block; widths not made of whole blocks go to `plain`."""

    def __init__(self, integers: Integers, *, group: int, rotates: bool, plain: Coder) -> None:
        self._bits = integers.bits
        self._group = group
        self._program_rows = _PROGRAM_ELEMENTS // (BLOCK * 8 // integers.bits)
        self._signs = Signs() if rotates else None
        self._is_stochastic = integers.is_stochastic
        self._plain = plain

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """Two parts: the scales of all groups, row by row, and the packed codes."""
        num_rows, width = x_ND.shape
        if not self._is_whole(width):
            return self._plain.encode(x_ND, message)
        scales = x_ND.new_empty(num_rows * width // self._group, dtype=torch.int16)
        codes = x_ND.new_empty(num_rows * width * self._bits // 8, dtype=torch.int8)
        seed = message.seed if self._is_stochastic else None
        with torch.accelerator.device_index(x_ND.device.index):
            encode_kernel[self._grid(num_rows, width)](
                x_ND.contiguous(), self._signs_of(x_ND.device, width), scales, codes, num_rows, width, seed,
                BITS=self._bits, GROUP=self._group, R=self._program_rows, num_warps=_NUM_WARPS,
            )  # fmt: skip
        return (flat_bytes(scales), flat_bytes(codes))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The matrix, within float32's rounding of what the coders it stands in for make of the parts."""
        num_rows, width = shape
        if not self._is_whole(width):
            return self._plain.decode(parts, shape, message)
        scales, codes = from_bytes(next(parts), torch.int16), next(parts).view(torch.int8)
        x_ND = codes.new_empty(shape, dtype=torch.float32)
        with torch.accelerator.device_index(x_ND.device.index):
            decode_kernel[self._grid(num_rows, width)](
                scales, codes, self._signs_of(x_ND.device, width), x_ND, num_rows, width,
                BITS=self._bits, GROUP=self._group, R=self._program_rows, num_warps=_NUM_WARPS,
            )  # fmt: skip
        return x_ND

    def _is_whole(self, width: int) -> bool:
        """Elements that share a byte lie in different blocks."""
        return width % (BLOCK * 8 // self._bits) == 0

    def _grid(self, num_rows: int, width: int) -> tuple[int, int]:
        return -(-num_rows // self._program_rows), width * self._bits // 8 // BLOCK

    def _signs_of(self, device: torch.device, width: int) -> Tensor | None:
        return None if self._signs is None else self._signs.on(device, width)
