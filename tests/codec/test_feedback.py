"""Error feedback: nothing is lost for good."""

import pytest
import torch
from torch import Tensor

from isthmus.codec.base import Key
from isthmus.codec.chain import CodecEnd, Codecs
from isthmus.errors import UserError
from isthmus.job.codec import parse_codec

CPU = torch.device("cpu")
WIDTH, NUM_ROWS = 16, 6


def ends(forward: str, backward: str = "raw") -> tuple[CodecEnd, CodecEnd]:
    codecs = Codecs(forward=parse_codec(forward), backward=parse_codec(backward), width=WIDTH)
    return CodecEnd(codecs, device=CPU), CodecEnd(codecs, device=CPU)


def rows(seed: int, num_rows: int = NUM_ROWS) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def pass_on(sending: CodecEnd, receiving: CodecEnd, x: Tensor, step: int, *, keeps: bool = True) -> Tensor:
    key = Key(step=step, microbatch=0)
    payload = sending.encode(x, key=key, keeps=keeps, learns=keeps)
    return receiving.decode(payload, key=key, num_rows=len(x), keeps=keeps)


@pytest.mark.parametrize("behind", ["topk(0.25)", "int2", "topk(0.25) | int8", "svd(0.3)"])
def test_what_is_dropped_is_sent_later(behind: str) -> None:
    sending, receiving = ends(f"feedback(1) | {behind}")
    x = rows(0)
    sent, arrived = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(60):
        sent += x
        arrived += pass_on(sending, receiving, x, step)
    plain = 60 * pass_on(*ends(behind), x, 0)
    assert (sent - arrived).norm() < 0.1 * sent.norm()
    assert (sent - arrived).norm() < 0.5 * (sent - plain).norm()


def test_the_sums_differ_by_what_is_still_owed() -> None:
    sending, receiving = ends("feedback(1) | topk(0.25)")
    sent, arrived = torch.zeros(NUM_ROWS, WIDTH), torch.zeros(NUM_ROWS, WIDTH)
    for step in range(9):
        sent += rows(step)
        arrived += pass_on(sending, receiving, rows(step), step)
    assert torch.allclose(sent - arrived, sending.state_dict()["forward.residual"], atol=1e-5)


def test_decay_forgets() -> None:
    sending, receiving = ends("feedback(0.5) | topk(0.25)")
    pass_on(sending, receiving, rows(0), 0)
    owed = sending.state_dict()["forward.residual"]
    zero = torch.zeros_like(owed)
    left = zero.clone()
    for step in range(1, 4):
        left += pass_on(sending, receiving, zero, step)
    largest = owed.abs().argmax()
    assert left.flatten()[largest] == pytest.approx(0.5 * owed.flatten()[largest].item())


def test_gradients_have_feedback_of_their_own() -> None:
    sending, receiving = ends("raw", "feedback(1) | topk(0.25)")
    g, arrived = rows(1), torch.zeros(NUM_ROWS, WIDTH)
    for step in range(60):
        key = Key(step=step, microbatch=0)
        pass_on(sending, receiving, rows(0), step)
        payload = receiving.encode_gradient(g, key=key)
        arrived += sending.decode_gradient(payload, key=key, num_rows=NUM_ROWS)
    assert (60 * g - arrived).norm() < 0.1 * (60 * g).norm()


def test_evaluation_neither_pays_nor_borrows() -> None:
    sending, receiving = ends("feedback(1) | topk(0.25)")
    pass_on(sending, receiving, rows(0), 0)
    owed = sending.state_dict()["forward.residual"].clone()
    there = pass_on(sending, receiving, rows(1, num_rows=3), 1, keeps=False)
    assert torch.equal(there, pass_on(*ends("topk(0.25)"), rows(1, num_rows=3), 1))
    assert torch.equal(sending.state_dict()["forward.residual"], owed)


def test_another_shape_is_refused_in_a_sentence() -> None:
    sending, receiving = ends("feedback(1) | int4")
    pass_on(sending, receiving, rows(0), 0)
    with pytest.raises(UserError, match="this one has 5 rows, the one before had 6") as caught:
        sending.encode(rows(1, num_rows=5), key=Key(step=1, microbatch=0))
    assert caught.value.hint is not None


def test_what_is_not_finite_crosses_once() -> None:
    sending, receiving = ends("feedback(1) | int8")
    x = rows(0)
    x[0, 0] = torch.nan
    assert pass_on(sending, receiving, x, 0).isnan().any()
    assert pass_on(sending, receiving, rows(1), 1).isfinite().all()


@pytest.mark.parametrize("forward", ["feedback(0.9) | topk(0.25) | int8", "feedback(1) | svd(0.5) | int4"])
def test_saved_and_restored_it_goes_on_to_the_bit(forward: str) -> None:
    sending, receiving = ends(forward)
    for step in range(3):
        pass_on(sending, receiving, rows(step), step)
    again = ends(forward)
    again[0].load_state_dict(sending.state_dict())
    again[1].load_state_dict(receiving.state_dict())
    for step in range(3, 6):
        there = pass_on(sending, receiving, rows(step), step)
        assert torch.equal(there, pass_on(*again, rows(step), step))
