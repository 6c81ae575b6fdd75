"""The rotation: orthogonal, its own inverse, for any width."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.codec.base import CodedMessage, Key
from isthmus.codec.formats import FloatCoder
from isthmus.codec.transforms import RotationCoder, fixed_signs, hadamard, split_width
from tests.codec.cuts import make_cut, noise

MESSAGE = CodedMessage(key=Key(step=0, microbatch=0), seed=0)


@settings(deadline=None, max_examples=60)
@given(num_rows=st.integers(0, 9), width=st.integers(1, 900))
def test_back_and_forth_is_the_identity_and_lengths_are_kept(num_rows: int, width: int) -> None:
    x_ND = noise(num_rows, width)  # noqa: N806
    coder = RotationCoder(rest=FloatCoder())
    (part,) = coder.encode(x_ND, MESSAGE)
    rotated = part.view(torch.float32).view(num_rows, width)
    torch.testing.assert_close(rotated.norm(dim=1), x_ND.norm(dim=1))
    torch.testing.assert_close(coder.decode(iter([part]), (num_rows, width), MESSAGE), x_ND)


@pytest.mark.parametrize(
    ("width", "blocks"),
    [(768, [(256, 3)]), (100, [(64, 1), (32, 1), (4, 1)]), (1, [(1, 1)]), (257, [(256, 1), (1, 1)])],
)
def test_blocks(width: int, blocks: list[tuple[int, int]]) -> None:
    assert split_width(width) == blocks


@pytest.mark.parametrize("size", [1, 2, 32, 256])
def test_hadamard_is_orthonormal_and_symmetric(size: int) -> None:
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size))
    assert torch.equal(matrix, matrix.T)


def test_one_large_element_becomes_many_small_ones() -> None:
    x_ND = torch.zeros(1, 256)  # noqa: N806
    x_ND[0, 17] = 16.0
    (part,) = RotationCoder(rest=FloatCoder()).encode(x_ND, MESSAGE)
    torch.testing.assert_close(part.view(torch.float32).abs(), torch.ones(256))


def test_a_constant_row_is_spread_too() -> None:
    (part,) = RotationCoder(rest=FloatCoder()).encode(torch.ones(1, 256), MESSAGE)
    assert float(part.view(torch.float32).abs().max()) < 5


def test_signs_are_fixed_for_all_time() -> None:
    assert fixed_signs(16).tolist() == fixed_signs(300)[:16].tolist()
    word = int("".join("1" if sign > 0 else "0" for sign in fixed_signs(32).tolist()), 2)
    assert hex(word) == "0x18ef4fcb"


def test_what_is_not_finite_spoils_its_block_alone() -> None:
    x_ND = noise(2, 512)  # noqa: N806
    x_ND[0, 5], x_ND[1, 300] = math.nan, math.inf
    _, arrived = make_cut("rotate | int4", width=512).send(x_ND)
    assert not bool(arrived[0, :256].isfinite().any() or arrived[1, 256:].isfinite().any())
    assert bool(arrived[0, 256:].isfinite().all() and arrived[1, :256].isfinite().all())
