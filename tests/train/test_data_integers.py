"""Integers over the link: nothing is lost, nothing is sent that need not be."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.model.heads import HEADS
from isthmus.model.stage import Batch
from isthmus.train.data.samples import LabelledSequence
from isthmus.train.data.training_data import collate
from isthmus.train.integers import narrow, pack_integers, unpack_integers
from isthmus.wan.packet import Packet, pack, unpack

PLANES = ("ids", "mask", "position_ids", "token_type_ids", "labels")
RIGHT = torch.tensor([[1, 1, 1], [1, 0, 0]])

numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 70000)


def planes(shape: tuple[int, int], elements: st.SearchStrategy[int] = numbers) -> st.SearchStrategy[Tensor]:
    size = shape[0] * shape[1]
    return st.lists(elements, min_size=size, max_size=size).map(lambda one: torch.tensor(one).reshape(shape))


@st.composite
def microbatches(draw: st.DrawFn) -> dict[str, Tensor]:
    """The integers of any micro-batch, padded or not, and others beside them."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
    lengths = torch.tensor(draw(st.lists(st.integers(0, shape[1]), min_size=shape[0], max_size=shape[0])))
    right = (torch.arange(shape[1]) < lengths[:, None]).long()
    ids = draw(planes(shape))
    mask = draw(st.none() | st.just(right))
    labels = st.none() | st.just(ids) | st.just(torch.where(right == 1, ids, -100)) | planes(shape)
    found = {
        "labels": draw(labels | planes((shape[0], 2)) | planes((shape[0], 1)).map(torch.flatten)),
        "ids": torch.where(right == 1, ids, 0) if draw(st.booleans()) else ids,
        "mask": mask,
        "position_ids": draw(st.none() | planes(shape)),
        "token_type_ids": draw(st.none() | planes(shape, st.integers(0, 1))),
        "held": draw(st.none() | st.lists(numbers, max_size=4).map(lambda one: torch.tensor(one).long())),
        "targets": draw(planes((1, 2)).map(torch.flatten)),
    }
    return {name: one for name, one in found.items() if one is not None}


def of_batch(batch: Batch) -> dict[str, Tensor]:
    values = {name: getattr(batch, name) for name in PLANES}
    return {name: value for name, value in values.items() if value is not None}


def over_the_line(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    planes, buffers = pack_integers(tensors)
    packet = unpack(memoryview(b"".join(pack(Packet({"integers": planes}, buffers)).segments)))
    return unpack_integers(packet.header["integers"], packet.buffers)


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in pack_integers(tensors)[1])


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.int64, name
        assert torch.equal(found[name], value), name


@settings(deadline=None)
@given(microbatches())
def test_every_micro_batch_arrives_as_it_was_sent(tensors: dict[str, Tensor]) -> None:
    assert_same(over_the_line(tensors), tensors)


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
    batch = collate([LabelledSequence(ids=ids, labels=ids)] * 4, head=HEADS["causal-lm"], pad_id=0)
    assert num_bytes(of_batch(batch)) == 2 * batch.ids.numel()


def test_padding_does_not_cross() -> None:
    head = HEADS["token-classification"]
    samples = [LabelledSequence(ids=np.arange(count), labels=np.arange(count)) for count in (100, 3)]
    assert num_bytes(of_batch(collate(samples, head=head, pad_id=9))) == 103 + 2


def test_labels_of_whole_sequences() -> None:
    samples = [LabelledSequence(ids=np.arange(count), labels=np.array(count)) for count in (4, 2)]
    batch = collate(samples, head=HEADS["sequence-classification"], pad_id=0)
    assert_same(over_the_line(of_batch(batch)), of_batch(batch))


Spoil = Callable[[dict[str, Any]], Any]


def _change(plane: str, key: str, value: object) -> Spoil:
    return lambda header: header[plane].update({key: value})


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
        lambda header: header.update(ids=1),
        lambda header: header.update(labels=None),
        lambda header: header.pop("ids"),
        lambda header: header.pop("lengths"),
        lambda header: header.update({f"more{number}": {"like_ids": True} for number in range(32)}),
    ],
)
def test_what_is_no_micro_batch_is_refused(spoil: Spoil) -> None:
    tensors = {"ids": torch.tensor([[1, 2, 3], [200, 0, 0]]), "mask": RIGHT, "labels": RIGHT * 255}
    header, views = pack_integers(tensors)
    assert_same(unpack_integers(header, views), tensors)
    buffers = [bytes(view) for view in views]
    spoil(header)
    lengths: Any = header.get("lengths", {})
    if lengths.get("type") == "|i1":
        buffers[0] = b"\xff\x01"
    with pytest.raises(FrameError):
        unpack_integers(header, buffers)


def test_a_few_bytes_cannot_ask_for_all_memory() -> None:
    """Padding need not cross, so a message may be much smaller than its tensors."""
    header, buffers = pack_integers({"ids": torch.tensor([[1, 2, 0]]), "mask": torch.tensor([[1, 1, 0]])})
    about = {"shape": [1, 2**23], "fill": 0, "like_ids": True}
    many = {**header, **{f"plane{number}": about for number in range(9)}}
    with pytest.raises(FrameError, match="over the limit together"):
        unpack_integers(many, buffers)


@pytest.mark.parametrize("planes", [None, [], "ids", 1, {"ids": 1}])
def test_a_header_that_lists_no_planes_is_refused(planes: object) -> None:
    with pytest.raises(FrameError, match="lists no integer tensors"):
        unpack_integers(planes, [])


@pytest.mark.parametrize(
    "mask", [[[1, 2, 0]], [[0, -1, 1]], [[0, 1]], [[1], [1]], [1, 1, 0], [[0, 1, 1], [0, 1, 1]]], ids=str
)
def test_a_mask_that_is_none_is_refused(mask: list[Any]) -> None:
    """It says how many rows cross, so it must be of the shape of the ids, and of ones and zeros."""
    header, buffers = pack_integers({"ids": torch.tensor([[1, 2, 3]])})
    more, other = pack_integers({"other": torch.tensor(mask)})
    with pytest.raises(FrameError, match="mask"):
        unpack_integers({**header, "mask": more["other"]}, [*buffers, *other])


def test_a_buffer_too_few_or_too_short_is_refused() -> None:
    header, _ = pack_integers({"ids": torch.tensor([[1, 300]])})
    with pytest.raises(FrameError, match="1 integer tensors in 0 buffers"):
        unpack_integers(header, [])
    with pytest.raises(FrameError, match="end within a number"):
        unpack_integers(header, [bytes(3)])
    with pytest.raises(FrameError, match="do not have the shape"):
        unpack_integers(header, [bytes(2)])
