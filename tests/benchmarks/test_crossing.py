"""A cut in the graph equals a cut between two ends, to the bit."""

import pytest
import torch
from quality.crossing import cross
from torch import Tensor

from isthmus.codec import Key
from isthmus.errors import FrameError
from tests.codec.cuts import KEY, Cut, activations, make_cut, noise

PAIRS = (
    ("raw", "raw"),
    ("fp16", "int8(scale=tensor)"),
    ("rotate | int4", "rotate | int4(stochastic)"),
    ("topk(0.2) | int8", "topk(0.2) | int8"),
    ("svd(0.5) | fp16", "svd(0.5) | int8"),
)


def in_graph(cut: Cut, x: Tensor, g: Tensor, key: Key, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    arrived = cross(leaf, sending=cut.sending, receiving=cut.receiving, key=key, mask=mask)
    arrived.backward(g)  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return arrived.detach(), leaf.grad


@pytest.mark.parametrize(("forward", "backward"), PAIRS)
def test_a_cut_in_the_graph_equals_a_real_one(forward: str, backward: str) -> None:
    graph, real = make_cut(forward, backward, width=64), make_cut(forward, backward, width=64)
    for step in range(3):
        key = Key(step=step, microbatch=0)
        x_ND, g_ND = activations(30, 64, seed=step), noise(30, 64, seed=50 + step)  # noqa: N806
        arrived, arrived_back = in_graph(graph, x_ND, g_ND, key)
        assert torch.equal(arrived, real.send(x_ND, key)[1])
        assert torch.equal(arrived_back, real.send_back(g_ND, key)[1])


@pytest.mark.parametrize(("forward", "backward"), PAIRS)
def test_padding_stays_behind(forward: str, backward: str) -> None:
    x_BTD, g_BTD = noise(12, 64).view(3, 4, 64), noise(12, 64, seed=1).view(3, 4, 64)  # noqa: N806
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])  # noqa: N806
    arrived, arrived_back = in_graph(make_cut(forward, backward, width=64), x_BTD, g_BTD, KEY, mask_BT)
    real, is_token = make_cut(forward, backward, width=64), mask_BT.bool()
    assert torch.equal(arrived[is_token], real.send(x_BTD[is_token])[1])
    assert torch.equal(arrived_back[is_token], real.send_back(g_BTD[is_token])[1])
    assert not bool(arrived[~is_token].any() or arrived_back[~is_token].any())


@pytest.mark.parametrize(("forward", "backward"), PAIRS)
def test_autocast_does_not_reach_the_codec(forward: str, backward: str) -> None:
    x_ND, g_ND = activations(30, 64), noise(30, 64)  # noqa: N806
    expected = in_graph(make_cut(forward, backward, width=64), x_ND, g_ND, KEY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = in_graph(make_cut(forward, backward, width=64), x_ND, g_ND, KEY)
    assert all(map(torch.equal, expected, found))


def test_types_are_restored() -> None:
    cut = make_cut("rotate | int8", "rotate | int8", width=64)
    arrived, arrived_back = in_graph(
        cut, noise(6, 64).bfloat16().view(2, 3, 64), noise(6, 64).bfloat16().view(2, 3, 64), KEY
    )
    assert arrived.dtype == arrived_back.dtype == torch.bfloat16
    assert arrived.shape == (2, 3, 64)


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    cut = make_cut("topk(0.5)", "topk(0.5)", width=8)
    with torch.no_grad():
        cross(noise(3, 8).requires_grad_(), sending=cut.sending, receiving=cut.receiving, key=KEY)
    cross(noise(3, 8), sending=cut.sending, receiving=cut.receiving, key=KEY)
    with pytest.raises(FrameError, match="whose activation has not passed"):
        cut.receiving.encode_gradient(noise(3, 8), key=KEY)
    with pytest.raises(FrameError, match="whose activation has not passed"):
        cut.sending.decode_gradient((torch.zeros(3 * 4 * 4, dtype=torch.uint8),), key=KEY, num_rows=3)
