"""What stages tell each other arrives as it was sent, and what does not fit is refused."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import FrameError
from isthmus.model.heads import HEADS
from isthmus.plan.types import Pass, Send
from isthmus.plan.window import Hop
from isthmus.train.messages import (
    Evaluated,
    Gradient,
    Microbatch,
    Tally,
    Verdict,
    drop_padding,
    pack_evaluated,
    pack_gradient,
    pack_microbatch,
    pack_tally,
    pack_verdict,
    read_address,
    read_sent_s,
    restore_padding,
    unpack_evaluated,
    unpack_gradient,
    unpack_microbatch,
    unpack_tally,
    unpack_verdict,
)
from isthmus.wan.packet import Packet, pack, unpack
from tests.model.cases import make_batch

SEND = Send(kind=Pass.FORWARD, step=3, microbatch=5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
numbers = st.floats()


def over_the_wire(packet: Packet) -> Packet:
    body = pack(packet)
    return unpack(memoryview(bytearray(b"".join(body.segments))))


def same(found: float, expected: float) -> bool:
    return found == expected or (math.isnan(found) and math.isnan(expected))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(DTYPES), st.booleans())
def test_a_microbatch_arrives_as_it_was(lengths: Sequence[int], dtype: torch.dtype, keeps: bool) -> None:
    batch = make_batch(HEADS["causal-lm"], lengths=lengths)
    assert batch.mask is not None
    crossing = torch.randn(*batch.ids.shape, 6).to(dtype) * batch.mask[..., None].to(dtype)
    sent = Microbatch(batch=batch, num_step_targets=77, crossing=crossing)
    packet = over_the_wire(pack_microbatch(sent, about=SEND, sent_s=1.5, keeps_padding=keeps))
    found = unpack_microbatch(packet, width=6)
    arrived = read_address(packet, Pass.FORWARD)
    assert (arrived.step, arrived.microbatch, read_sent_s(packet)) == (3, 5, 1.5)
    assert found.num_step_targets == 77
    assert found.crossing is not None
    assert found.crossing.dtype is dtype
    assert torch.equal(found.crossing, crossing)
    assert torch.equal(found.batch.ids, batch.ids)
    assert found.batch.labels is not None
    assert batch.labels is not None
    assert torch.equal(found.batch.labels, batch.labels)


def test_padding_does_not_cross() -> None:
    batch = make_batch(HEADS["causal-lm"], lengths=(9, 1, 1))
    sent = Microbatch(batch=batch, num_step_targets=1, crossing=torch.zeros(3, 9, 64))
    packet = pack_microbatch(sent, about=SEND, sent_s=0.0)
    assert 11 * 64 * 4 <= packet.payload_bytes < 12 * 64 * 4


def test_a_gradient_arrives_as_it_was() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    values = torch.randn(2, 3, 4) * mask[..., None]
    packet = over_the_wire(pack_gradient(Gradient(values=values, mask=mask), about=SEND, sent_s=0.0))
    rows = unpack_gradient(packet)
    assert rows.shape == (3, 4)
    assert torch.equal(restore_padding(rows, mask, shape=(2, 3, 4)), values)
    assert torch.equal(drop_padding(values, None), values)


@given(
    numbers,
    st.lists(numbers, max_size=9).map(tuple),
    st.lists(st.floats(0, 9), min_size=1, max_size=4).map(tuple),
)
def test_a_tally_arrives_even_if_it_is_not_finite(
    loss: float, norms: tuple[float, ...], busy_s: tuple[float, ...]
) -> None:
    hops = tuple(Hop(forward_s=one, backward_s=2 * one, latency_s=0.5) for one in busy_s[1:])
    sent = Tally(step=4, loss_sum=loss, squared_norms=norms, busy_s=busy_s, hops=hops, travel_s=0.25)
    found = unpack_tally(over_the_wire(pack_tally(sent)))
    assert (found.step, found.busy_s, found.hops, found.travel_s) == (4, busy_s, hops, 0.25)
    assert same(found.loss_sum, loss)
    assert all(same(*pair) for pair in zip(found.squared_norms, norms, strict=True))


def test_verdicts_and_evaluations_arrive() -> None:
    verdict = Verdict(step=9, norm=1e300, windows=(4, 2, 1), save=True)
    assert unpack_verdict(over_the_wire(pack_verdict(verdict))) == verdict
    found = Evaluated(step=9, loss_sum=12.5, num_correct=3, num_targets=5)
    assert unpack_evaluated(over_the_wire(pack_evaluated(found))) == found
    assert found.loss == 2.5


@pytest.mark.parametrize(
    "crossing",
    [None, "float32", ["float32"], ["float64", [2, 6]], ["float32", [2, -6]], ["float32", [2, 5]],
     ["float32", [True, 12]], ["int64", [1, 6]], ["float32", [1, 1, 1, 12]]],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_its_bytes_is_refused(crossing: object) -> None:
    with pytest.raises(FrameError):
        unpack_gradient(Packet({"crossing": crossing}, (bytearray(48),)))


@pytest.mark.parametrize("header", [{}, {"step": -1, "microbatch": 0}, {"step": True, "microbatch": 0}])
def test_an_address_must_be_one(header: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        read_address(Packet(header), Pass.FORWARD)


def test_what_crossed_must_fit_the_ids() -> None:
    batch = make_batch(HEADS["causal-lm"], lengths=(4, 4))
    sent = Microbatch(batch=batch, num_step_targets=1, crossing=torch.zeros(2, 4, 6))
    packet = over_the_wire(pack_microbatch(sent, about=SEND, sent_s=0.0))
    with pytest.raises(FrameError, match="does not fit"):
        unpack_microbatch(packet, width=8)


@pytest.mark.parametrize(
    "packet", [Packet({"step": 1}), Packet({"step": 1, "windows": [0]}, (bytearray(8),))]
)
def test_words_of_the_wrong_form_are_refused(packet: Packet) -> None:
    for read in (unpack_tally, unpack_verdict, unpack_evaluated):
        with pytest.raises(FrameError):
            read(packet)
