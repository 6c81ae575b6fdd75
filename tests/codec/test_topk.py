"""Top-k: what is kept, where, and the gradient at the same places."""

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.codec import Key
from isthmus.codec.formats import pack_bits, pack_indices, unpack_bits, unpack_indices
from isthmus.errors import FrameError
from tests.codec.cuts import KEY, make_cut, noise, sizes


@settings(deadline=None, max_examples=60)
@given(
    ratio=st.floats(0.001, 1),
    shape=st.tuples(st.integers(1, 8), st.integers(1, 200)),
    seed=st.integers(0, 99),
)
def test_the_largest_of_each_row_arrive_and_the_rest_is_zero(
    ratio: float, shape: tuple[int, int], seed: int
) -> None:
    x_ND = noise(*shape, seed=seed)  # noqa: N806
    _, arrived = make_cut(f"topk({ratio:.4f})", width=shape[1]).send(x_ND)
    kept = max(1, round(round(ratio, 4) * shape[1]))
    is_kept = arrived != 0
    assert bool((is_kept.sum(dim=1) == kept).all())
    assert torch.equal(arrived[is_kept], x_ND[is_kept])
    if kept < shape[1]:
        smallest = x_ND.abs().where(is_kept, math.inf).amin(dim=1)
        assert bool((x_ND.abs().where(~is_kept, 0.0).amax(dim=1) <= smallest).all())


@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_the_gradient_crosses_at_the_same_places(ratio: float) -> None:
    text = f"topk({ratio})"
    cut = make_cut(text, text, width=400)
    _, arrived = cut.send(noise(6, 400))
    g_ND = noise(6, 400, seed=1)  # noqa: N806
    payload, arrived_back = cut.send_back(g_ND)
    assert torch.equal(arrived_back, g_ND * (arrived != 0))
    assert sizes(payload) == (6 * round(400 * ratio) * 4,)


def test_gradients_of_several_activations_in_flight() -> None:
    cut = make_cut("topk(0.1)", "topk(0.1)", width=50)
    keys = [Key(step=0, microbatch=index) for index in range(3)]
    masks = [cut.send(noise(4, 50, seed=index), key)[1] != 0 for index, key in enumerate(keys)]
    for key, mask in reversed(list(zip(keys, masks, strict=True))):
        _, arrived = cut.send_back(torch.ones(4, 50), key)
        assert torch.equal(arrived, mask.float())


def test_a_gradient_without_its_activation_is_refused() -> None:
    cut = make_cut("topk(0.1)", "topk(0.1)", width=50)
    with pytest.raises(FrameError, match="whose activation has not passed"):
        cut.receiving.encode_gradient(noise(4, 50), key=KEY)
    payload = cut.sending.encode(noise(4, 50), key=KEY, keeps=False)
    cut.receiving.decode(payload, key=KEY, num_rows=4, keeps=False)
    with pytest.raises(FrameError, match="whose activation has not passed"):
        cut.receiving.encode_gradient(noise(4, 50), key=KEY)


def test_a_gradient_of_other_rows_than_its_activation_is_refused() -> None:
    cut = make_cut("topk(0.1)", "topk(0.1)", width=50)
    cut.send(noise(4, 50))
    payload = make_payload(num_rows=9)
    with pytest.raises(FrameError):
        cut.sending.decode_gradient(payload, key=KEY, num_rows=9)


def make_payload(*, num_rows: int) -> tuple[torch.Tensor, ...]:
    other = make_cut("topk(0.1)", "topk(0.1)", width=50)
    other.send(noise(num_rows, 50))
    return other.receiving.encode_gradient(noise(num_rows, 50), key=KEY)


def test_nothing_is_left_behind_when_gradients_have_passed() -> None:
    cut = make_cut("topk(0.1)", "topk(0.1)", width=50)
    cut.send(noise(4, 50))
    cut.send_back(noise(4, 50))
    with pytest.raises(FrameError):
        cut.receiving.encode_gradient(noise(4, 50), key=KEY)


def test_what_is_not_finite_is_kept_first() -> None:
    x_ND = noise(3, 100, scale=1e6)  # noqa: N806
    x_ND[0, 3], x_ND[1, 50], x_ND[2, 99] = math.nan, math.inf, -math.inf
    for text in ("topk(0.05)", "topk(0.05) | int8"):
        _, arrived = make_cut(text, width=100).send(x_ND)
        assert bool(arrived[0, 3].isnan())
        assert float(arrived[1, 50]) == math.inf
        assert float(arrived[2, 99]) == -math.inf


@settings(deadline=None, max_examples=50)
@given(
    bits=st.integers(1, 17),
    num_rows=st.integers(0, 4),
    num_indices=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_indices_pack_and_unpack(bits: int, num_rows: int, num_indices: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    index_NK = torch.randint(2**bits, (num_rows, num_indices), generator=generator)  # noqa: N806
    packed = pack_indices(index_NK, bits)
    assert packed.shape == (num_rows, -(-num_indices * bits // 8))
    assert torch.equal(unpack_indices(packed, bits, num_indices=num_indices), index_NK)


def test_bits_pack_and_unpack() -> None:
    bits = noise(5, 21) > 0
    packed = pack_bits(bits)
    assert packed.shape == (5, 3)
    assert torch.equal(unpack_bits(packed, 21).bool(), bits)


@pytest.mark.parametrize("backward", ["raw", "int8", "topk(0.3)", "topk(0.1)"])
def test_nothing_is_kept_of_an_activation_once_its_gradient_has_passed(backward: str) -> None:
    """A gradient that crosses raw goes past both ends, and no other one may leave anything behind either."""
    cut = make_cut("topk(0.1) | fp16", backward, width=70)
    for step in range(3):
        key = Key(step=step, microbatch=0)
        cut.send(noise(11, 70, seed=step), key)
        if backward != "raw":
            cut.send_back(noise(11, 70, seed=step), key)
    indices = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (11, 7)]
    assert indices == []
