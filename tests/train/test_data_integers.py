"""Integers over the link: nothing is lost, nothing is sent that need not be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.model.boundary import Batch
from isthmus.model.heads import HEADS
from isthmus.train.crossing.integers import Packed, narrow, pack_batch, unpack_batch
from isthmus.train.data.batches import collate
from isthmus.train.data.samples import Sample
from isthmus.wan.packet import Packet, pack, unpack

PLANES = ("ids", "mask", "position_ids", "token_type_ids", "labels")
RIGHT = torch.tensor([[1, 1, 1], [1, 0, 0]])

numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 70000)


def planes(shape: tuple[int, int], elements: st.SearchStrategy[int] = numbers) -> st.SearchStrategy[Tensor]:
    size = shape[0] * shape[1]
    return st.lists(elements, min_size=size, max_size=size).map(lambda one: torch.tensor(one).reshape(shape))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Any micro-batch, padded or not, on whichever side."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
    lengths = torch.tensor(draw(st.lists(st.integers(0, shape[1]), min_size=shape[0], max_size=shape[0])))
    right = (torch.arange(shape[1]) < lengths[:, None]).long()
    ids = draw(planes(shape))
    mask = draw(st.none() | st.just(right) | planes(shape, st.integers(0, 1)))
    labels = st.none() | st.just(ids) | st.just(torch.where(right == 1, ids, -100)) | planes(shape)
    return Batch(
        ids=torch.where(right == 1, ids, 0) if draw(st.booleans()) else ids,
        num_targets=draw(st.integers(0, 10**6)),
        mask=mask,
        position_ids=draw(st.none() | planes(shape)),
        token_type_ids=draw(st.none() | planes(shape, st.integers(0, 1))),
        labels=draw(labels | planes((shape[0], 2)) | planes((shape[0], 1)).map(torch.flatten)),
    )


def over_the_wire(packed: Packed) -> Batch:
    body = pack(Packet(packed.header, packed.buffers))
    packet = unpack(memoryview(b"".join(body.segments)))
    return unpack_batch(packet.header, packet.buffers)


def assert_same(found: Batch, expected: Batch) -> None:
    assert found.num_targets == expected.num_targets
    for name in PLANES:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        assert one is None or (one.dtype == torch.int64 and torch.equal(one, other)), name


@settings(deadline=None)
@given(batches())
def test_every_micro_batch_arrives_as_it_was_sent(batch: Batch) -> None:
    assert_same(over_the_wire(pack_batch(batch)), batch)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_narrow_integers_are_the_same_and_no_wider_than_need_be(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    small = narrow(array)
    assert small.tolist() == values
    half = small.dtype.itemsize // 2
    assert half == 0 or not any(
        all(np.iinfo(f"{kind}{half}").min <= value <= np.iinfo(f"{kind}{half}").max for value in values)
        for kind in "iu"
    )


def test_a_packed_language_model_sends_two_bytes_a_token() -> None:
    ids = np.arange(300, 428)
    batch = collate([Sample(ids=ids, labels=ids)] * 4, head=HEADS["causal-lm"], pad_id=0)
    packed = pack_batch(batch)
    assert sum(memoryview(buffer).nbytes for buffer in packed.buffers) == 2 * batch.ids.numel()


def test_padding_does_not_cross() -> None:
    head = HEADS["token-classification"]
    samples = [Sample(ids=np.arange(count), labels=np.arange(count)) for count in (100, 3)]
    packed = pack_batch(collate(samples, head=head, pad_id=9))
    assert sum(memoryview(buffer).nbytes for buffer in packed.buffers) == 103 + 2


def test_labels_of_whole_sequences() -> None:
    samples = [Sample(ids=np.arange(count), labels=np.array(count)) for count in (4, 2)]
    batch = collate(samples, head=HEADS["sequence-classification"], pad_id=0)
    assert_same(over_the_wire(pack_batch(batch)), batch)


def _change(plane: str, key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["planes"][plane].update({key: value})


@pytest.mark.parametrize(
    "spoil",
    [
        _change("ids", "shape", [2, 2**40]),
        _change("ids", "shape", [2**20, 2**20]),
        _change("ids", "shape", [2, -3]),
        _change("ids", "shape", [2, True]),
        _change("ids", "shape", "2x3"),
        _change("ids", "shape", [6]),
        _change("ids", "shape", [3, 3]),
        _change("ids", "type", "<i8"),
        _change("ids", "type", "O"),
        _change("ids", "type", None),
        _change("ids", "fill", "x"),
        _change("ids", "fill", True),
        _change("ids", "fill", 2**64),
        _change("ids", "fill", None),
        _change("ids", "like_ids", True),
        _change("labels", "shape", [2, 9]),
        _change("lengths", "type", "<u2"),
        _change("lengths", "type", "|i1"),
        lambda header: header.update(planes=None),
        lambda header: header.update(planes={"ids": 1}),
        lambda header: header["planes"].pop("ids"),
        lambda header: header["planes"].pop("lengths"),
        lambda header: header.update(num_targets=-1),
        lambda header: header.update(num_targets=None),
    ],
)
def test_what_is_no_micro_batch_is_refused(spoil: Callable[[dict[str, Any]], None]) -> None:
    batch = Batch(ids=torch.tensor([[1, 2, 3], [200, 0, 0]]), num_targets=2, mask=RIGHT, labels=RIGHT * 255)
    packed = pack_batch(batch)
    assert_same(unpack_batch(packed.header, packed.buffers), batch)
    header: Any = packed.header
    spoil(header)
    buffers = [bytes(buffer) for buffer in packed.buffers]
    if header.get("planes") and header["planes"].get("lengths", {}).get("type") == "|i1":
        buffers[0] = b"\xff\x01"
    with pytest.raises(FrameError):
        unpack_batch(header, buffers)


def test_a_buffer_too_few_or_too_short_is_refused() -> None:
    packed = pack_batch(Batch(ids=torch.tensor([[1, 300]]), num_targets=2))
    with pytest.raises(FrameError, match="1 planes in 0 buffers"):
        unpack_batch(packed.header, [])
    with pytest.raises(FrameError, match="end within a number"):
        unpack_batch(packed.header, [bytes(3)])
    with pytest.raises(FrameError, match="do not have the shape"):
        unpack_batch(packed.header, [bytes(2)])
