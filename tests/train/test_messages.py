"""What stages tell each other arrives as it was sent, and what does not fit is refused."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.codec.base import flat_bytes
from isthmus.errors import FrameError
from isthmus.job.codec import parse_codec
from isthmus.model.heads import HEADS
from isthmus.plan.ladder import Pair
from isthmus.plan.types import Pass, Send
from isthmus.plan.window import Hop
from isthmus.train.crossing.coded import Coded, raw_rows
from isthmus.train.crossing.cut import RAW_PAIR
from isthmus.train.crossing.messages import (
    Microbatch,
    pack_begin,
    pack_gradient,
    pack_microbatch,
    read_address,
    read_sent_s,
    unpack_begin,
    unpack_gradient,
    unpack_microbatch,
)
from isthmus.train.crossing.rows import drop_padding, restore_padding, valid_rows
from isthmus.train.crossing.words import (
    Cosines,
    Evaluated,
    Tally,
    Verdict,
    pack_evaluated,
    pack_tally,
    pack_verdict,
    unpack_evaluated,
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


def coded(rows: Tensor) -> Coded:
    return Coded(codec="raw", dtype=rows.dtype, num_rows=len(rows), parts=(flat_bytes(rows),))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_a_microbatch_arrives_as_it_was(lengths: Sequence[int], dtype: torch.dtype) -> None:
    batch = make_batch(HEADS["causal-lm"], lengths=lengths)
    assert batch.mask is not None
    crossing = torch.randn(*batch.ids.shape, 6).to(dtype) * batch.mask[..., None].to(dtype)
    index = valid_rows(batch.mask)
    sent = Microbatch(batch=batch, num_step_targets=77)
    rows = coded(drop_padding(crossing, index))
    packet = over_the_wire(pack_microbatch(sent, rows, about=SEND, sent_s=1.5))
    found, arrived_rows = unpack_microbatch(packet)
    arrived = read_address(packet, "forward")
    assert (arrived.kind, arrived.step, arrived.microbatch) == (Pass.FORWARD, 3, 5)
    assert read_sent_s(packet) == 1.5
    assert (found.num_step_targets, found.held, found.crossing) == (77, (), None)
    assert arrived_rows is not None
    restored = raw_rows(arrived_rows, width=6)
    assert restored.dtype is dtype
    assert torch.equal(restore_padding(restored, index, shape=tuple(crossing.shape)), crossing)
    assert torch.equal(found.batch.ids, batch.ids)
    assert found.batch.labels is not None
    assert batch.labels is not None
    assert torch.equal(found.batch.labels, batch.labels)


def test_padding_does_not_cross() -> None:
    batch = make_batch(HEADS["causal-lm"], lengths=(9, 1, 1))
    rows = coded(drop_padding(torch.zeros(3, 9, 64), valid_rows(batch.mask)))
    packet = pack_microbatch(Microbatch(batch=batch, num_step_targets=1), rows, about=SEND, sent_s=0.0)
    assert 11 * 64 * 4 <= packet.payload_bytes < 12 * 64 * 4


def test_where_nothing_is_padded_nothing_is_copied() -> None:
    values = torch.randn(2, 3, 4)
    rows = drop_padding(values, valid_rows(torch.ones(2, 3)))
    assert rows.data_ptr() == values.data_ptr()
    assert restore_padding(rows, None, shape=(2, 3, 4)).data_ptr() == values.data_ptr()


def test_of_what_is_held_only_the_integers_cross() -> None:
    batch = make_batch(HEADS["causal-lm"], lengths=(4, 2))
    sent = Microbatch(batch=batch, num_step_targets=1, held=(0, 1))
    packet = over_the_wire(pack_microbatch(sent, None, about=SEND, sent_s=0.0))
    found, rows = unpack_microbatch(packet)
    assert (found.is_held, rows) == (True, None)
    assert torch.equal(found.batch.ids, batch.ids)
    some = valid_rows(batch.mask, without=(0,))
    assert some is not None
    assert some.tolist() == [4, 5]
    for changed in ({"held": [7, 8]}, {"held": "all"}, {"held": [0]}):
        with pytest.raises(FrameError):
            unpack_microbatch(Packet({**packet.header, **changed}, packet.buffers))


def test_a_gradient_arrives_as_it_was() -> None:
    index = valid_rows(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    values = torch.randn(2, 3, 4) * torch.tensor([[1, 1, 0], [1, 0, 0]])[..., None]
    packet = over_the_wire(pack_gradient(coded(drop_padding(values, index)), about=SEND, sent_s=0.0))
    assert read_address(packet, "backward").kind is Pass.BACKWARD
    rows = raw_rows(unpack_gradient(packet), width=4)
    assert torch.equal(restore_padding(rows, index, shape=(2, 3, 4)), values)


def test_what_a_bottleneck_begins_with_arrives() -> None:
    sent = {"weight": torch.randn(4, 2), "anchors.table": torch.randn(3, 4).bfloat16(), "none": torch.ones(0)}
    found = unpack_begin(over_the_wire(pack_begin(sent)))
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], one) for name, one in sent.items())
    for about in (None, ["float32"], ["float64", [4, 2]], ["float32", [4, -2]], ["float32", [4, 3]]):
        with pytest.raises(FrameError):
            unpack_begin(Packet({"tensors": {"weight": about}}, (bytearray(32),)))


@given(
    numbers,
    st.lists(numbers, max_size=9).map(tuple),
    st.lists(st.floats(0, 9), min_size=1, max_size=4).map(tuple),
)
def test_a_tally_arrives_even_if_it_is_not_finite(
    loss: float, norms: tuple[float, ...], busy_s: tuple[float, ...]
) -> None:
    hops = tuple(
        Hop(forward_s=one, backward_s=2 * one, latency_s=0.5, coding_s=3 * one) for one in busy_s[1:]
    )
    cosines = tuple(Cosines(forward=one / 9, backward=0.5) for one in busy_s[1:])
    sent = Tally(
        step=4,
        loss_sum=loss,
        squared_norms=norms,
        busy_s=busy_s,
        hops=hops,
        travel_s=0.25,
        coding_s=0.125,
        cosines=cosines,
        element_bytes=(2,) * len(hops),
        gradient_cosine=0.75,
    )
    found = unpack_tally(over_the_wire(pack_tally(sent)))
    assert (found.step, found.busy_s, found.hops) == (4, busy_s, hops)
    assert (found.travel_s, found.coding_s) == (0.25, 0.125)
    assert (found.cosines, found.gradient_cosine) == (cosines, 0.75)
    assert found.element_bytes == (2,) * len(hops)
    assert same(found.loss_sum, loss)
    assert all(same(*pair) for pair in zip(found.squared_norms, norms, strict=True))


def test_verdicts_and_evaluations_arrive() -> None:
    pair = Pair(forward=parse_codec("rotate | int4"), backward=parse_codec("int8(stochastic)"))
    verdict = Verdict(step=9, norm=1e300, windows=(4, 2, 1), save=True, codecs=(pair, RAW_PAIR))
    assert unpack_verdict(over_the_wire(pack_verdict(verdict))) == verdict
    found = Evaluated(step=9, loss_sum=12.5, num_correct=3, num_targets=5, is_plain=True)
    assert unpack_evaluated(over_the_wire(pack_evaluated(found))) == found
    assert found.loss == 2.5


@pytest.mark.parametrize(
    "crossing", [None, "raw", ["raw", "float32", 2], ["raw", "float64", 2, 1], ["raw", "float32", 2, 2],
                 ["raw", "float32", 2, -1], ["raw", "float32", -2, 1], [4, "float32", 2, 1]],
)  # fmt: skip
def test_what_crosses_must_be_what_the_header_says(crossing: object) -> None:
    with pytest.raises(FrameError):
        unpack_gradient(Packet({"crossing": crossing}, (bytearray(48),)))


@pytest.mark.parametrize(("num_rows", "width"), [(2, 5), (3, 6), (0, 6)])
def test_rows_must_fit_their_bytes(num_rows: int, width: int) -> None:
    with pytest.raises(FrameError, match="do not come in"):
        raw_rows(replace(coded(torch.zeros(2, 6)), num_rows=num_rows), width=width)


@pytest.mark.parametrize("header", [{}, {"step": -1, "microbatch": 0}, {"step": True, "microbatch": 0}])
def test_an_address_must_be_one(header: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        read_address(Packet(header), "forward")


def test_what_crossed_must_fit_its_place() -> None:
    with pytest.raises(FrameError, match="does not fit"):
        restore_padding(torch.zeros(8, 6), None, shape=(2, 4, 8))


@pytest.mark.parametrize(
    "packet",
    [
        Packet({"step": 1}),
        Packet({"step": 1}, (*map(bytearray, (32, 0, 8, 0, 0)), struct.pack("<d", 3.0))),
        Packet({"step": 1, "windows": [0]}, (bytearray(8),)),
        Packet({"windows": [1], "codecs": [["raw", "int5"]]}, (bytearray(8),)),
        Packet({"windows": [1], "codecs": [["raw", "subspace(4)"]]}, (bytearray(8),)),
        Packet({"windows": [1], "codecs": [["raw"]]}, (bytearray(8),)),
    ],
)
def test_words_of_the_wrong_form_are_refused(packet: Packet) -> None:
    for read in (unpack_tally, unpack_verdict, unpack_evaluated):
        with pytest.raises(FrameError):
            read(packet)
