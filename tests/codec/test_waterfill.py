"""Bits by variance, and the integers that they make."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.codec.integers import ERRORS, MAX_BITS, allot_bits, column_code
from isthmus.job.codec_steps import shared_bits_bytes


def squared_error(variances: list[float], bits: tuple[int, ...]) -> float:
    return sum(variance * ERRORS[count] for variance, count in zip(variances, bits, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=3), st.data())
def test_no_other_way_to_share_bits_loses_less(variances: list[float], data: st.DataObject) -> None:
    num_bits = data.draw(st.integers(0, MAX_BITS * len(variances)))
    bits = allot_bits(variances, num_bits=num_bits)
    others = (one for one in product(range(MAX_BITS + 1), repeat=len(variances)) if sum(one) == num_bits)
    best = min(squared_error(variances, other) for other in others)
    assert sum(bits) == num_bits
    assert squared_error(variances, bits) <= best * (1 + 1e-9)


def test_a_direction_below_the_water_gets_no_bits() -> None:
    assert allot_bits([100.0, 1.0, 1e-4], num_bits=6) == (5, 1, 0)


def test_equal_directions_get_equal_bits() -> None:
    assert allot_bits([0.0] * 4, num_bits=8) == (2, 2, 2, 2)


def test_more_bits_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="17 bits for 2 columns"):
        allot_bits([1.0, 1.0], num_bits=17)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=20), st.integers(0, 5), st.integers(0, 2**16))
def test_any_widths_and_any_bytes_have_their_size_and_shape(
    bits: list[int], num_rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    code = column_code(bits, torch.ones(len(bits)))
    size = shared_bits_bytes(num_rows, sum(bits))
    assert code.encode(torch.randn(num_rows, len(bits), generator=generator)).numel() == size
    noise = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    assert code.decode(noise, num_rows=num_rows).shape == (num_rows, len(bits))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(0, 2**16))
def test_what_was_decoded_decodes_to_itself(bits: list[int], seed: int) -> None:
    y = torch.randn(7, len(bits), generator=torch.Generator().manual_seed(seed))
    code = column_code(bits, torch.ones(len(bits)))
    packed = code.encode(y)
    once = code.decode(packed, num_rows=7)
    scale_codes = packed[:7]
    again = code._values(code._levels(once, scale_codes, None), scale_codes)
    assert torch.equal(again, once)


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_gaussian_rows_lose_what_the_table_says(num_bits: int) -> None:
    y = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    code = column_code([num_bits] * 64, torch.ones(64))
    lost = (code.decode(code.encode(y), num_rows=500) - y).square().mean().item()
    assert lost == pytest.approx(ERRORS[num_bits], rel=0.25)


def test_rows_of_any_size_keep_their_precision() -> None:
    y = torch.randn(61, 32, generator=torch.Generator().manual_seed(2))
    code = column_code([6] * 32, torch.ones(32))
    for scale in (1e-6, 1.0, 1e6):
        lost = code.decode(code.encode(scale * y), num_rows=61) / scale - y
        assert lost.square().mean().item() < 2 * ERRORS[6]


def test_a_row_with_one_large_entry_keeps_it() -> None:
    y = 0.1 * torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    y[0, 5] = 20.0
    code = column_code([4] * 64, torch.ones(64))
    assert code.decode(code.encode(y), num_rows=1)[0, 5].item() == pytest.approx(20.0, rel=0.15)


def test_rows_of_zeros_stay_zero_and_rows_that_are_not_finite_come_back_as_nan() -> None:
    y = torch.ones(4, 3)
    y[0] = 0
    y[1, 1], y[2, 2] = torch.inf, torch.nan
    code = column_code([4, 0, 4], torch.ones(3))
    back = code.decode(code.encode(y), num_rows=4)
    assert torch.equal(back[0], torch.zeros(3))
    assert back[1:3].isnan().all()
    assert back[3].isfinite().all()


def test_rounding_at_random_is_unbiased() -> None:
    generator = torch.Generator().manual_seed(4)
    y = torch.randn(1, 16, generator=generator).clamp(-1.2, 1.2).expand(4000, 16).contiguous()
    code = column_code([4] * 16, torch.ones(16))
    noise = torch.rand(4000, 16, generator=generator)
    mean = code.decode(code.encode(y, noise), num_rows=4000).mean(dim=0)
    assert torch.allclose(mean, y[0], atol=0.02)
