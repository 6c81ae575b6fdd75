"""Small integers to bytes and back, row by row, so that the bytes of a row depend on that row alone."""

import torch
from torch import Tensor
from torch.nn import functional


def pack_codes(codes_ND: Tensor, bits: int) -> Tensor:
    """Codes of 8, 4 or 2 bits, held as floats, in rows of bytes.

    Those of 8 and 4 bits are signed, those of 2 bits go from 0 to 3. A byte holds elements that lie half a
    row, or a quarter, apart: so both sides are contiguous, and floats are joined before they become integers.
    """
    if bits == 8:
        return codes_ND.to(torch.int8).view(torch.uint8)
    lanes = _lanes(codes_ND, 8 // bits)
    joined = lanes[0] if len(lanes) == 1 else torch.add(lanes[0], lanes[1], alpha=2**bits)
    for index, lane in enumerate(lanes[2:], start=2):
        joined.add_(lane, alpha=2 ** (index * bits))
    if bits == 4:
        return joined.to(torch.int8).view(torch.uint8)
    return joined.to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, *, width: int) -> Tensor:
    """Rows of codes as float32, from rows of bytes; any byte stands for some codes."""
    if bits == 8:
        return packed.view(torch.int8).to(torch.float32)
    num_lanes = 8 // bits
    codes_ND = packed.new_empty(packed.shape[0], num_lanes * packed.shape[1], dtype=torch.float32)
    for index, lane in enumerate(codes_ND.chunk(num_lanes, dim=1)):
        lane.copy_(_signed_lane(packed, index) if bits == 4 else (packed >> (index * bits)) & 3)
    return codes_ND[:, :width]


def pack_bits(bits_NB: Tensor) -> Tensor:
    """Rows of booleans in rows of bytes, the first of eight in the lowest bit."""
    padded = functional.pad(bits_NB.to(torch.uint8), (0, -bits_NB.shape[1] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=bits_NB.device)
    num_rows, num_bits = padded.shape
    return torch.sum(padded.view(num_rows, num_bits // 8, 8) << places, dim=2, dtype=torch.uint8)


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """Rows of zeros and ones, as uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(2) >> places) & 1).flatten(1)[:, :num_bits]


def pack_indices(index_NK: Tensor, bits: int) -> Tensor:
    """Rows of indices in rows of bytes, the lowest bit first."""
    places = torch.arange(bits, device=index_NK.device)
    return pack_bits(((index_NK.unsqueeze(2) >> places) & 1).flatten(1))


def unpack_indices(packed: Tensor, bits: int, *, num_indices: int) -> Tensor:
    """Rows of indices, as int64."""
    places = torch.arange(bits, device=packed.device)
    bits_NKB = unpack_bits(packed, num_indices * bits).reshape(-1, num_indices, bits)
    return torch.sum(bits_NKB.to(torch.int64) << places, dim=2)


def _lanes(codes_ND: Tensor, num_lanes: int) -> tuple[Tensor, ...]:
    missing = -codes_ND.shape[1] % num_lanes
    padded = functional.pad(codes_ND, (0, missing)) if missing else codes_ND
    return padded.chunk(num_lanes, dim=1)


def _signed_lane(packed: Tensor, index: int) -> Tensor:
    # A byte is low + 16 * high with both from -8 to 7; 8 more make the low one a plain remainder.
    shifted = packed.view(torch.int8) + 8
    return shifted >> 4 if index else (shifted & 15) - 8
