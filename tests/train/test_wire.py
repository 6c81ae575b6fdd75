"""What members send each other arrives as it was, and what does not fit is refused."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.model.heads import HEADS
from isthmus.model.stage import Batch
from isthmus.plan.end_of_step import Cosines, Evaluated, Tally, Verdict
from isthmus.plan.scenario import Hop
from isthmus.plan.types import Carried, Facts, Member, MessageKind
from isthmus.train.pipeline import PipelineConfig
from isthmus.wan.packet import Packet
from tests.model.cases import make_batch
from tests.train.chain import CutCase, config
from tests.train.wires import Joined, with_integers

WIDTH = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATION, EVALUATION, GRADIENT = MessageKind.ACTIVATION, MessageKind.EVALUATION, MessageKind.GRADIENT
numbers = st.floats()


def joined(agreed: PipelineConfig | None = None, *, cut: int = 0) -> Joined:
    return Joined(agreed or config(2, 2), hidden_width=WIDTH, cut=cut)


def integers_of(batch: Batch) -> dict[str, Tensor]:
    assert batch.mask is not None
    assert batch.labels is not None
    targets = torch.tensor([batch.num_targets, 77])
    return {"ids": batch.ids, "mask": batch.mask, "labels": batch.labels, "targets": targets}


def microbatch(lengths: Sequence[int], dtype: torch.dtype = torch.float32, width: int = WIDTH) -> Any:
    integers = integers_of(make_batch(HEADS["causal-lm"], lengths=lengths))
    hidden = torch.randn(*integers["ids"].shape, width).to(dtype)
    return {**integers, "hidden": hidden * integers["mask"][..., None].to(dtype)}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(DTYPES), st.booleans())
def test_a_microbatch_and_its_gradient_arrive_as_they_were(
    lengths: Sequence[int], dtype: torch.dtype, is_training: bool
) -> None:
    sent = microbatch(lengths, dtype)
    kind = ACTIVATION if is_training else EVALUATION
    with joined() as wires:
        found = wires.down(kind, sent)
        assert_same(found.tensors, sent)
        assert found.message[:5] == (kind, 3, 5, Member("north"), (Member("east"),))
        assert 0 <= found.travel_s < 10
        if is_training:
            gradient = torch.randn_like(sent["hidden"]) * sent["mask"][..., None].to(dtype)
            assert_same(wires.up(GRADIENT, {"hidden": gradient}).tensors, {"hidden": gradient})


def test_padding_does_not_cross() -> None:
    with Joined(config(2, 2), hidden_width=64) as wires:
        sent, _, packet = wires.before.send(ACTIVATION, microbatch((9, 1, 1), width=64))
    assert 11 * 64 * 4 <= packet.payload_bytes < 12 * 64 * 4
    assert isinstance(sent.facts, Carried)
    assert sent.facts.num_elements == 11 * 64
    assert sent.facts.num_bytes > packet.payload_bytes
    assert (sent.facts.element_bytes, sent.facts.rtt_s) == (4, 0.01)


def test_what_experts_mix_crosses_with_its_padding() -> None:
    sent = microbatch((9, 1))
    sent["hidden"] = torch.randn(2, 9, WIDTH)
    with joined(config(2, 2, keeps_padding=True)) as wires:
        assert_same(wires.down(ACTIVATION, sent).tensors, sent)


def test_what_a_bottleneck_starts_with_arrives() -> None:
    sent = {"weight": torch.randn(4, 2), "anchors.table": torch.randn(3, 4).bfloat16(), "none": torch.ones(0)}
    with joined() as wires:
        assert_same(wires.down(MessageKind.BASIS, sent).tensors, sent)


@pytest.mark.parametrize(
    "about",
    [None, ["float32"], ["float64", [4, 2]], ["float32", [4, -2]], ["float32", [4, 3]],
     ["float32", [4, True]], ["float32", [1, 1, 4, 2]], ["float32", "42"], ["float32", [2**40, 2**40]]],
    ids=str,
)  # fmt: skip
def test_a_tensor_must_be_what_the_header_says(about: object) -> None:
    def spoil(stream: str, packet: Packet) -> tuple[str, Packet]:
        return stream, Packet({**packet.header, "tensors": {"weight": about}}, packet.buffers)

    with joined() as wires, pytest.raises(FrameError):
        wires.down(MessageKind.BASIS, {"weight": torch.randn(4, 2)}, spoil=spoil)


def same(found: float, expected: float) -> bool:
    return found == expected or (math.isnan(found) and math.isnan(expected))


@settings(deadline=None, max_examples=50)
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
    with joined() as wires:
        found = wires.up(MessageKind.TALLY, {}, facts=sent).message.facts
    assert isinstance(found, Tally)
    assert (found.step, found.busy_s, found.hops) == (4, busy_s, hops)
    assert (found.travel_s, found.coding_s) == (0.25, 0.125)
    assert (found.cosines, found.gradient_cosine) == (cosines, 0.75)
    assert found.element_bytes == (2,) * len(hops)
    assert same(found.loss_sum, loss)
    assert all(same(*pair) for pair in zip(found.squared_norms, norms, strict=True))


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        (
            MessageKind.VERDICT,
            Verdict(step=9, norm=1e300, windows=(4, 2, 1), save=True, codecs=(("rotate | int4", "raw"),)),
        ),
        (
            MessageKind.EVALUATED,
            Evaluated(step=9, loss_sum=12.5, num_correct=3, num_targets=5, is_plain=True),
        ),
    ],
)
def test_verdicts_and_evaluations_arrive(kind: MessageKind, facts: Facts) -> None:
    with joined() as wires:
        found = wires.down(kind, {}, facts=facts)
    assert found.message.facts == facts
    assert found.tensors == {}


def test_an_urgent_word_is_taken_in_before_activations_that_have_arrived() -> None:
    wires = joined()
    _, stream, early = wires.before.send(ACTIVATION, microbatch((9, 1)))
    facts = Verdict(step=3, norm=1.0, windows=(1, 1))
    _, urgent, _ = wires.before.send(MessageKind.VERDICT, {}, facts=facts)
    asked: list[tuple[str, ...]] = []

    def receive_any(streams: tuple[str, ...], *, timeout_s: float) -> Any:  # noqa: ARG001
        asked.append(streams)
        raise FrameError("enough")

    wires.behind.line.receive_any = receive_any  # type: ignore[method-assign]
    with wires, pytest.raises(FrameError, match="enough"):
        wires.behind.receive(stream, early)
    assert asked[0].index(urgent) < asked[0].index(stream)


Change = Callable[[dict[str, Any]], object]


def spoilt(change: Change) -> Any:
    def spoil(stream: str, packet: Packet) -> tuple[str, Packet]:
        header: dict[str, Any] = dict(packet.header)
        return change(header) or stream, Packet(header, packet.buffers)  # type: ignore[return-value]

    return spoil


def put(key: str, value: object) -> Change:
    return lambda header: header.update({key: value})


def drop(key: str) -> Change:
    def change(header: dict[str, Any]) -> None:
        del header[key]

    return change


@pytest.mark.parametrize(
    "hidden",
    [None, "raw", ["raw", "float32", 10], ["raw", "float64", 10, 1], ["raw", "float32", 10, 2],
     ["raw", "float32", 10, -1], ["raw", "float32", -10, 1], [4, "float32", 10, 1], ["raw", "float32", 9, 1],
     ["raw", "float16", 10, 1], ["raw", "float32", 10, 1, 1], ["int8", "float32", 10, 1],
     ["raw", "float32", True, 1], ["raw", "float32", 10, 99]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_gradient", [False, True])
def test_hidden_states_must_be_what_the_header_says(hidden: object, is_gradient: bool) -> None:
    sent = microbatch((9, 1))
    change = spoilt(put("hidden", hidden))
    with joined() as wires:
        if not is_gradient:
            with pytest.raises(FrameError):
                wires.down(ACTIVATION, sent, spoil=change)
            return
        wires.down(ACTIVATION, sent)
        with pytest.raises(FrameError):
            wires.up(GRADIENT, {"hidden": sent["hidden"]}, spoil=change)


VALUES: dict[str, tuple[object, ...]] = {
    "step": (-1, True, 1.0, None, 2**53),
    "item": (-1, True, 1.0, None, 2**53),
    "kind": ("backward", "tally", "x", None, 3, [], "state"),
    "sent_s": (None, 1, "1", [1.0], float("inf")),
    "facts": ("", "{}", {}, 1),
    "codecs": (None, [], {"other": "raw"}, {"hidden": 1}, {"hidden": "int5"}, {"hidden": "int8"},
               {"hidden": "raw", "gradient": "subspace(4)"}),
    "tensors": (None, [], {"more": ["float32", [1]]}),
    "integers": (None, [], {}),
}  # fmt: skip
CHANGES: dict[str, Change] = {
    **{f"{key} {value}": put(key, value) for key, values in VALUES.items() for value in values},
    **{f"no {key}": drop(key) for key in VALUES if key != "facts"},
    "stream": lambda _: "backward",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_header_of_the_wrong_form_is_refused(change: Change) -> None:
    with joined(config(2, 2, cuts=(CutCase(),))) as wires:
        sent = microbatch((9, 1))
        codecs = (("hidden", "raw"), ("gradient", "raw"))
        assert_same(wires.down(ACTIVATION, sent, codecs=codecs).tensors, sent)
        with pytest.raises(FrameError):
            wires.down(ACTIVATION, sent, codecs=codecs, item=6, spoil=spoilt(change))


@pytest.mark.parametrize("changes", [{"ids": None}, {"ids": torch.arange(18)}, {"hidden": None}], ids=str)
def test_a_micro_batch_without_what_it_needs_is_refused(changes: dict[str, Tensor | None]) -> None:
    sent = microbatch((9, 9))
    integers = {name: one for name, one in {**sent, **changes}.items() if name not in ("hidden", "mask")}
    found = {name: one for name, one in integers.items() if one is not None}
    with joined() as wires:
        _, stream, packet = wires.before.send(ACTIVATION, sent)
        with pytest.raises(FrameError, match="without"):
            wires.behind.receive(stream, with_integers(packet, found, has_hidden="hidden" not in changes))


def test_a_gradient_of_nothing_is_refused() -> None:
    with joined() as wires:
        sent = microbatch((9, 1))
        wires.down(ACTIVATION, sent)
        _, stream, packet = wires.behind.send(GRADIENT, {"hidden": sent["hidden"]})
        wires.before.receive(stream, packet)
        with pytest.raises(FrameError, match="the gradient of nothing"):
            wires.before.receive(stream, packet)


@pytest.mark.parametrize("kind", [ACTIVATION, GRADIENT])
def test_what_comes_from_the_wrong_side_of_a_cut_is_refused(kind: MessageKind) -> None:
    with joined() as wires:
        sent = microbatch((9, 1))
        _, stream, packet = wires.before.send(ACTIVATION, sent)
        wires.behind.receive(stream, packet)
        if kind is ACTIVATION:
            with pytest.raises(FrameError, match="side"):
                wires.before.receive(stream, packet)
        else:
            _, stream, packet = wires.behind.send(GRADIENT, {"hidden": sent["hidden"]})
            with pytest.raises(FrameError, match="side"):
                wires.behind.receive(stream, packet)


@pytest.mark.parametrize(
    "facts",
    ["", "{}", "[]", "null", "x" * 40_000, '{"step":-1,"norm":1.0,"windows":[1]}',
     '{"step":1,"norm":1.0,"windows":[0]}', '{"step":1,"norm":1.0,"windows":[1],"codecs":[["raw"]]}',
     '{"step":1,"norm":1.0,"windows":[1],"more":1}', '{"step":1,"norm":"1","windows":[1]}', 7, None, {}],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
def test_words_of_the_wrong_form_are_refused(facts: object) -> None:
    sent = Verdict(step=1, norm=1.0, windows=(1, 1))
    with joined() as wires, pytest.raises(FrameError):
        wires.down(MessageKind.VERDICT, {}, facts=sent, spoil=spoilt(put("facts", facts)))


def test_of_what_is_cached_only_the_integers_cross() -> None:
    agreed = config(2, 2, cuts=(CutCase(),), first_trained=1, cache_bytes=1 << 20)
    sent = microbatch((4, 2))
    integers = {name: one for name, one in sent.items() if name != "hidden"}
    none, both, one = (torch.tensor(held).long() for held in ([], [0, 1], [1]))
    with joined(agreed) as wires:
        assert_same(wires.down(ACTIVATION, {**sent, "held": none}).tensors, {**sent, "held": none})
        report, _, packet = wires.before.send(ACTIVATION, {**integers, "held": both}, item=6)
        assert isinstance(report.facts, Carried)
        assert (report.facts.num_elements, report.facts.rtt_s) == (0, 0.01)
        assert packet.payload_bytes < 40
        assert_same(wires.behind.receive("forward", packet).tensors, {**sent, "held": both})
        changed = {**sent, "ids": sent["ids"] + torch.tensor([[1], [0]]), "held": one}
        assert_same(wires.down(ACTIVATION, changed, item=7).tensors, changed)


@pytest.mark.parametrize("held", [[0, 1], [0], [7, 8], [1, 0], [0, 0], [-1], [[0, 1]]], ids=str)
@pytest.mark.parametrize("has_hidden", [False, True])
def test_the_sender_cannot_count_on_what_is_not_cached(held: list[int], has_hidden: bool) -> None:
    agreed = config(2, 2, cuts=(CutCase(),), first_trained=1, cache_bytes=1 << 20)
    sent = {**microbatch((4, 2)), "held": torch.zeros(0).long()}
    with joined(agreed) as wires:
        _, stream, packet = wires.before.send(ACTIVATION, sent)
        integers = {name: one for name, one in sent.items() if name != "hidden"}
        spoilt = with_integers(packet, {**integers, "held": torch.tensor(held)}, has_hidden=has_hidden)
        with pytest.raises(FrameError):
            wires.behind.receive(stream, spoilt)


def test_only_frozen_stages_may_be_given_no_hidden_states() -> None:
    cuts = (CutCase(),) * 2
    sent = microbatch((4, 2))
    del sent["hidden"]
    sent["held"] = torch.tensor([0, 1])
    with joined(config(3, 2, cuts=cuts, first_trained=2, cache_bytes=1 << 20)) as wires:
        assert_same(wires.down(ACTIVATION, sent).tensors, sent)
        with pytest.raises(FrameError, match="without hidden states"):
            wires.down(ACTIVATION, {**sent, "held": torch.tensor([0])}, item=6)
    for first_trained, cache_bytes in ((2, 0), (0, 1 << 20)):
        agreed = config(3, 2, cuts=cuts, first_trained=first_trained, cache_bytes=cache_bytes)
        with joined(agreed) as wires, pytest.raises(FrameError, match="without hidden states"):
            wires.down(ACTIVATION, sent)


def test_more_tokens_than_a_micro_batch_has_are_refused_before_there_is_memory_for_them() -> None:
    """Padding does not cross, so that a few bytes could ask for hidden states of any size."""
    agreed = config(2, 2, cuts=(CutCase(num_rows=20),))
    codecs = (("hidden", "raw"), ("gradient", "raw"))
    with joined(agreed) as wires:
        sent = microbatch((9, 1))
        assert_same(wires.down(ACTIVATION, sent, codecs=codecs).tensors, sent)
        _, stream, packet = wires.before.send(ACTIVATION, sent, codecs=codecs, item=6)
        ids = torch.zeros(2, 2**22).long()
        mask = torch.zeros_like(ids)
        mask[0, :9] = mask[1, 0] = 1
        with pytest.raises(FrameError, match="8388608 tokens"):
            wires.behind.receive(stream, with_integers(packet, {"ids": ids, "mask": mask}))


@pytest.mark.parametrize("name", ["ids", "hidden"])
def test_a_tensor_that_is_listed_twice_is_refused(name: str) -> None:
    def spoil(stream: str, packet: Packet) -> tuple[str, Packet]:
        *first, last = packet.buffers
        header = {**packet.header, "tensors": {name: ["float32", [2]]}}
        return stream, Packet(header, [*first, bytearray(8), last])

    with joined() as wires, pytest.raises(FrameError, match="twice"):
        wires.down(ACTIVATION, microbatch((9, 1)), spoil=spoil)
