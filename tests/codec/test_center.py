"""The mean row of a message crosses by itself."""

import torch

from tests.codec.cuts import make_cut

KEY_WIDTH = 256


def _with_offset() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x_ND = torch.randn(64, KEY_WIDTH, generator=generator)  # noqa: N806
    x_ND[:, 7] += 100.0
    return x_ND


def _relative_error(text: str, x_ND: torch.Tensor) -> float:  # noqa: N803
    _, arrived = make_cut(text, width=KEY_WIDTH).send(x_ND)
    varying = x_ND - x_ND.mean(0)
    return float((arrived - x_ND).norm() / varying.norm())


def test_a_dimension_that_is_large_for_every_token_costs_nothing() -> None:
    x_ND = _with_offset()  # noqa: N806
    plain = x_ND - x_ND.mean(0)
    centred = _relative_error("center | rotate | int4", x_ND)
    assert centred < 1.1 * _relative_error("rotate | int4", plain)
    assert centred < 0.5 * _relative_error("rotate | int4", x_ND)


def test_a_column_that_is_not_finite_spoils_no_other() -> None:
    x_ND = _with_offset()  # noqa: N806
    x_ND[3, 5] = torch.inf
    _, arrived = make_cut("center | int8", width=KEY_WIDTH).send(x_ND)
    assert arrived[3, 5] == torch.inf
    assert arrived[4:].isfinite().all()


def test_the_same_topk_behind_it_sends_the_indices_once() -> None:
    cut = make_cut("center | topk(0.25)", "center | topk(0.25)", width=KEY_WIDTH)
    _, arrived = cut.send(_with_offset())
    g_ND = _with_offset().flip(0)  # noqa: N806
    payload, back = cut.send_back(g_ND)
    mean_D = g_ND.mean(0).to(torch.bfloat16).float()  # noqa: N806
    is_kept = arrived != _with_offset().mean(0).to(torch.bfloat16).float()
    assert [part.numel() for part in payload] == [2 * KEY_WIDTH, 64 * KEY_WIDTH]
    assert torch.allclose(back, torch.where(is_kept, g_ND, mean_D), atol=1e-4)
