"""One end of a cut: which codecs it takes, which rows cross, and the state that it continues from."""

from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.errors import FrameError, UserError
from isthmus.job.codec import parse_codec
from isthmus.plan import codecs as plan
from isthmus.plan.codecs import Crossing, Pair, read_pair, texts_of
from isthmus.plan.types import Member, Message, MessageKind
from isthmus.train.coding import CodecState, Coded, CutCoding, CutEnd
from isthmus.train.device import Device, Mark
from isthmus.train.integers import MASK, drop_padding, restore_padding, valid_rows

WIDTH = 16
IDS = torch.arange(12).view(2, 6)
HIDDEN = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def pair(forward: str, backward: str) -> Pair:
    return Pair(forward=parse_codec(forward), backward=parse_codec(backward))


SUBSPACE = pair("subspace(4, every=1) | int8", "int8(stochastic)")
INT8 = pair("rotate | int8", "rotate | int8(stochastic)")


def test_a_pair_is_read_back() -> None:
    codecs = pair("center | rotate | int4", "rotate | int8")
    assert read_pair(list(texts_of(codecs))) == codecs


@pytest.mark.parametrize(
    "texts",
    [
        None,
        ["raw"],
        ["raw", 1],
        ["raw", "none"],
        ["raw", "subspace(8)"],
        ["fp16 | int8", "raw"],
        [f"int8(group={'9' * 5000})", "raw"],
        [f"topk(1e{'9' * 5000})", "raw"],
        ["center | " * 5000 + "raw", "raw"],
        ["(" * 5000, "raw"],
        ["\ud800", "raw"],
    ],
    ids=lambda one: str(one)[:30],
)
def test_anything_else_is_no_valid_frame(texts: object) -> None:
    with pytest.raises(FrameError) as caught:
        read_pair(texts)
    assert len(caught.value.message) < 300


def test_where_nothing_is_padded_nothing_is_copied() -> None:
    values = torch.randn(2, 3, 4)
    rows = drop_padding(values, valid_rows(torch.ones(2, 3)))
    assert rows.data_ptr() == values.data_ptr()
    assert restore_padding(rows, None, shape=(2, 3, 4)).data_ptr() == values.data_ptr()


def test_sequences_that_are_cached_do_not_cross() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    some = valid_rows(mask, without=(0,))
    assert some is not None
    assert some.tolist() == [4, 5]


def test_what_crossed_must_fit_its_place() -> None:
    with pytest.raises(FrameError, match="does not fit"):
        restore_padding(torch.zeros(8, 6), None, shape=(2, 4, 8))


class Lenient(plan.Cut):
    """A cut at which every codec is allowed."""

    def allows(self, pair: Pair) -> bool:  # noqa: ARG002
        return True


class Cut:
    """Both ends of a cut, without wires between them."""

    def __init__(self, *, is_strict: bool = False, **changes: Any) -> None:
        num_microbatches = changes.pop("num_microbatches", 1)
        coding = CutCoding(
            cut=(plan.Cut if is_strict else Lenient)(crossing=Crossing(num_rows=64, width=WIDTH), **changes),
            hidden_width=WIDTH,
            crossing_width=WIDTH,
            num_microbatches=num_microbatches,
            rows=lambda integers: valid_rows(integers.get(MASK)),
        )
        self.sending, self.receiving = (
            CutEnd(coding=coding, device=Device("cpu"), is_sender=is_sender) for is_sender in (True, False)
        )

    def down(self, codecs: Pair, *, step: int, item: int = 0, is_training: bool = True) -> Tensor | None:
        message = activation(codecs, step=step, item=item, is_training=is_training)
        coded = self.sending.encode(message, HIDDEN, {"ids": IDS}, after=Mark())
        return self.receiving.decode(message, coded, {"ids": IDS})

    def up(self, codecs: Pair, *, step: int, item: int = 0) -> Tensor | None:
        coded = self.receiving.encode(gradient(codecs, step=step, item=item), HIDDEN, {}, after=Mark())
        return self.sending.decode(gradient(codecs, step=step, item=item), coded, {})

    def states(self, step: int) -> tuple[CodecState, CodecState]:
        return self.sending.state(step), self.receiving.state(step)


def activation(codecs: Pair, *, step: int, item: int = 0, is_training: bool = True) -> Message:
    kind = MessageKind.ACTIVATION if is_training else MessageKind.EVALUATION
    forward, backward = texts_of(codecs)
    both = (("hidden", forward), ("gradient", backward))
    return Message(kind, step, item, Member("north"), (Member("east"),), None, both)


def gradient(codecs: Pair, *, step: int, item: int = 0) -> Message:
    own = (("hidden", texts_of(codecs)[1]),)
    return Message(MessageKind.GRADIENT, step, item, Member("east"), (Member("north"),), None, own)


def test_a_gradient_is_coded_by_the_state_of_its_activation_though_another_codec_is_in_force() -> None:
    late, early = Cut(), Cut()
    for cut in (late, early):
        cut.down(SUBSPACE, step=0)
    expected = early.up(SUBSPACE, step=0)
    late.down(INT8, step=1)
    found = late.up(SUBSPACE, step=0)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_codecs_that_return_start_with_fresh_state() -> None:
    changed, fresh = Cut(), Cut()
    for step, codecs in enumerate((SUBSPACE, SUBSPACE, INT8)):
        changed.down(codecs, step=step)
        changed.up(codecs, step=step)
    for one, other in zip(changed.states(3), fresh.states(3), strict=True):
        assert one.pair == INT8
        assert other.tensors == {}
    found, expected = (cut.down(SUBSPACE, step=3) for cut in (changed, fresh))
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("is_training", [True, False])
def test_codecs_that_the_job_does_not_allow_are_refused(is_training: bool) -> None:
    receiver = Cut(is_strict=True, codecs=INT8).receiving
    coded = Cut().sending.encode(activation(SUBSPACE, step=0), HIDDEN, {"ids": IDS}, after=Mark())
    with pytest.raises(FrameError, match="the job does not allow"):
        receiver.decode(activation(SUBSPACE, step=0, is_training=is_training), coded, {"ids": IDS})


def test_what_crossed_must_be_coded_as_its_message_says() -> None:
    cut = Cut()
    coded = cut.sending.encode(activation(SUBSPACE, step=0), HIDDEN, {"ids": IDS}, after=Mark())
    with pytest.raises(FrameError, match=r'where "rotate \| int8" is due'):
        cut.receiving.decode(activation(INT8, step=0), coded, {"ids": IDS})


@pytest.mark.parametrize(("num_rows", "width"), [(12, WIDTH - 1), (13, WIDTH), (0, WIDTH)])
def test_rows_must_fit_their_bytes(num_rows: int, width: int) -> None:
    raw = pair("raw", "raw")
    part = torch.zeros(12 * width * 4).byte()
    coded = Coded(codec="raw", dtype=torch.float32, num_rows=num_rows, parts=(part,))
    with pytest.raises(FrameError, match="rows"):
        Cut().receiving.decode(activation(raw, step=0), coded, {"ids": IDS})


def test_the_receiver_keeps_the_state_that_a_step_started_with_though_its_messages_have_come() -> None:
    cut = Cut()
    for step in range(2):
        cut.down(SUBSPACE, step=step)
        cut.up(SUBSPACE, step=step)
    before = cut.states(2)
    cut.down(SUBSPACE, step=2)
    after = cut.receiving.state(2)
    assert after.tensors.keys() == before[1].tensors.keys()
    assert all(torch.equal(after.tensors[name], one) for name, one in before[1].tensors.items())


def test_both_ends_continue_from_their_state() -> None:
    whole, resumed = Cut(), Cut()
    for step in range(2):
        whole.down(SUBSPACE, step=step)
        whole.up(SUBSPACE, step=step)
    for end, state in zip((resumed.sending, resumed.receiving), whole.states(2), strict=True):
        end.load(state)
    for step in (2, 3):
        down = [cut.down(SUBSPACE, step=step) for cut in (whole, resumed)]
        up = [cut.up(SUBSPACE, step=step) for cut in (whole, resumed)]
        for one, other in (down, up):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_state_that_is_not_of_its_codec_is_refused_with_a_cure() -> None:
    state = CodecState(pair=SUBSPACE, tensors={})
    with pytest.raises(UserError) as caught:
        Cut().sending.load(state)
    assert caught.value.hint


@pytest.mark.parametrize(("guard_every", "expected"), [(5, [0, 5, 10]), (0, [])])
def test_every_so_many_messages_are_measured_by_their_own_number(
    guard_every: int, expected: list[int]
) -> None:
    cut = Cut(guard_every=guard_every, num_microbatches=4)
    measured: dict[str, list[int]] = {"down": [], "up": []}
    for number in range(12):
        step, item = divmod(number, 4)
        message = activation(INT8, step=step, item=item)
        coded = cut.sending.encode(message, HIDDEN, {"ids": IDS}, after=Mark())
        cut.receiving.decode(message, coded, {"ids": IDS})
        back = cut.receiving.encode(gradient(INT8, step=step, item=item), HIDDEN, {}, after=Mark())
        for way, one in (("down", coded), ("up", back)):
            if one.fidelity is not None:
                assert one.fidelity.cosine > 0.99
                measured[way].append(number)
    assert measured == {"down": expected, "up": expected}
