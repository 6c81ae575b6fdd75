"""A pipeline over links trains to the bit like one graph in which what crosses is coded."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from isthmus.errors import Aborted, FrameError
from isthmus.job.codec import parse_boundary, parse_codec
from isthmus.model.blueprint import Blueprint
from isthmus.plan.codecs import Pair
from isthmus.plan.end_of_step import Tally
from isthmus.train.coding import Coded, CutEnd
from isthmus.train.pipeline import PipelineConfig
from tests.model.cases import blueprint
from tests.train.chain import SCHEDULE, WEIGHT_DECAY, CutCase, Given, Record, chain, config, make_stages
from tests.train.reference import assert_same, parameters_of, train_across
from tests.train.resuming import keep_all, take_up
from tests.train.test_exactness import batches

CODECS = {
    "casts": ("bf16", "fp16"),
    "only back": ("raw", "int8(scale=tensor)"),
    "int8": ("rotate | int8", "rotate | int8"),
    "int4 stochastic": ("rotate | int4", "rotate | int4(stochastic)"),
    "topk": ("topk(0.5) | int8", "topk(0.5) | int8"),
    "svd": ("svd(0.6) | fp16", "svd(0.6) | fp16"),
    "subspace": ("subspace(6, every=2) | int8", "int8(stochastic)"),
    "anchored subspace": ("subspace(6, anchor=tokens, every=2) | int4", "int4(stochastic)"),
}
BOTTLENECK = "bottleneck(5, warmup=2)"


def cut(forward: str, backward: str, *, boundary: str = "hidden", **changes: Any) -> CutCase:
    pair = Pair(forward=parse_codec(forward), backward=parse_codec(backward))
    return CutCase(codecs=pair, boundary=parse_boundary(boundary), **changes)


def in_one_graph(
    plan: Blueprint,
    agreed: PipelineConfig,
    cuts: Sequence[CutCase],
    steps: Any,
    *,
    changes: Mapping[int, Sequence[CutCase]] | None = None,
) -> tuple[dict[str, Any], list[float]]:
    stages = make_stages(plan, agreed)
    losses = train_across(
        stages,
        steps,
        cuts=cuts,
        seed=11,
        learning_rates=[SCHEDULE.at(step) for step in range(len(steps))],
        weight_decay=WEIGHT_DECAY,
        max_norm=0.5,
        num_warmup_steps=agreed.num_warmup_steps,
        changes=changes,
    )
    return parameters_of(stages), losses


@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
def test_every_codec(codecs: tuple[str, str]) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2, num_steps=4)
    cuts = (cut(*codecs), cut(*codecs))
    agreed = config(3, 2, num_steps=4, cuts=cuts)
    expected, losses = in_one_graph(plan, agreed, cuts, steps)
    with chain(plan, agreed) as found:
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), expected)
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_bottlenecks_with_coded_numbers(num_stages: int) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 3)
    cuts = (cut("int4", "int4(stochastic)", boundary=BOTTLENECK),) * (num_stages - 1)
    agreed = config(num_stages, 3, cuts=cuts)
    expected, _ = in_one_graph(plan, agreed, cuts, steps)
    with chain(plan, agreed) as found:
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), expected)


RESUMED = {
    "int4 stochastic": (cut("rotate | int4", "rotate | int4(stochastic)"), 3),
    "svd": (cut("svd(0.6) | fp16", "svd(0.6) | fp16"), 2),
    "subspace": (cut("subspace(6, anchor=tokens, every=2) | int8", "int8(stochastic)"), 3),
    "before the bottleneck": (cut("int4", "int4(stochastic)", boundary=BOTTLENECK), 1),
    "at the bottleneck": (cut("int4", "int4(stochastic)", boundary=BOTTLENECK), 2),
    "behind the bottleneck": (cut("int4", "int4(stochastic)", boundary=BOTTLENECK), 3),
}


@pytest.mark.parametrize(("between", "step"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_equals_one_that_never_stopped(between: CutCase, step: int) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 3)
    agreed = config(3, 3, cuts=(between, between))
    with chain(plan, agreed) as whole:
        kept = keep_all(whole)
        whole.run(Given(steps))
    with chain(plan, agreed) as resumed:
        states = take_up(resumed, kept, step)
        resumed.run(Given(steps), first_step=step, states=states)
    assert_same(parameters_of(resumed.stages), parameters_of(whole.stages))


def test_evaluation_is_done_with_codecs_and_without_and_leaves_no_trace() -> None:
    plan = blueprint("llama")
    steps, held_out = batches(plan, 2), batches(plan, 3, num_steps=1)[0]
    cuts = (cut("subspace(6, every=2) | int2", "int8"),)
    agreed = config(
        2, 2, cuts=cuts, evaluate_every=2, num_validation_microbatches=3, evaluates_without_codecs=True
    )
    with chain(plan, agreed) as found:
        found.run(Given(steps, held_out))
    with chain(plan, config(2, 2, cuts=cuts)) as without:
        without.run(Given(steps))
    expected, _ = in_one_graph(plan, agreed, cuts, steps)
    assert_same(parameters_of(found.stages), expected)
    for record, other in zip(found.records, without.records, strict=True):
        assert_same_codec_states(record, other)
    evaluations = found.records[0].evaluations
    assert [(one.step, one.is_plain) for one in evaluations] == [
        (step, is_plain) for step in (2, 4, 5) for is_plain in (False, True)
    ]
    assert len({one.num_targets for one in evaluations}) == 1
    assert all(one.loss != other.loss for one, other in pairwise(evaluations))


def assert_same_codec_states(found: Record, expected: Record) -> None:
    assert [one.step for one in found.saves] == [one.step for one in expected.saves] == [1, 2, 3, 4, 5]
    for one, other in zip(found.saves, expected.saves, strict=True):
        assert one.wires.keys() == other.wires.keys()
        for peer, state in other.wires.items():
            assert one.wires[peer].pair == state.pair
            assert_same(dict(one.wires[peer].tensors), dict(state.tensors))


def test_coding_is_noted_and_what_crossed_is_counted() -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2, num_steps=2)
    with chain(plan, config(2, 2, num_steps=2, cuts=(cut("int8", "raw"),))) as found:
        found.run(Given(steps))
    north, east = found.records
    encoded = [span for span in north.spans if span.kind == "encode"]
    decoded = [span for span in east.spans if span.kind == "decode"]
    assert len(encoded) == len(decoded) == 4
    assert {span.track for span in encoded + decoded} == {"north→east"}
    num_tokens = sum(int(batch.mask.sum()) for step in steps for batch in step if batch.mask is not None)
    assert sum(span.num_bytes for span in encoded) == num_tokens * (16 + 2)
    sent = [sum(one.num_elements for one in record.steps) for record in (north, east)]
    assert sent == [num_tokens * 16] * 2
    assert sum(one.num_bytes for one in north.steps) < sum(one.num_bytes for one in east.steps)


@pytest.mark.parametrize(
    "codecs", [("rotate | int4", "raw"), ("subspace(4) | int8", "int8"), ("raw", "int8")]
)
def test_a_payload_that_was_spoilt_ends_the_run(
    codecs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = CutEnd.encode

    def shortened(self: CutEnd, *args: Any, **options: Any) -> Coded:
        coded = encode(self, *args, **options)
        return coded._replace(parts=tuple(part[:-1] for part in coded.parts))

    plan = blueprint("llama")
    monkeypatch.setattr(CutEnd, "encode", shortened)
    with (
        chain(plan, config(2, 2, cuts=(cut(*codecs),))) as found,
        pytest.raises((FrameError, Aborted)) as caught,
    ):
        found.run(Given(batches(plan, 2)))
    assert "bytes" in str(caught.value)


def test_ends_that_disagree_on_the_codec_are_found_out() -> None:
    plan = blueprint("llama")
    agreed = config(2, 2, cuts=(cut("int8", "int8"),))
    other = config(2, 2, cuts=(cut("int4", "int4"),))
    with chain(plan, agreed) as found, pytest.raises((FrameError, Aborted), match="the job does not allow"):
        found.run(Given(batches(plan, 2)), configs={1: other})


SUBSPACE = cut("subspace(6, every=2) | int8", "int8(stochastic)")
INT8 = cut("rotate | int8", "rotate | int8(stochastic)")


def test_codecs_that_change_and_change_back_start_afresh_at_both_ends() -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2)
    first, second = (SUBSPACE, SUBSPACE), (INT8, INT8)
    agreed = config(3, 2, cuts=first)
    expected, losses = in_one_graph(plan, agreed, first, steps, changes={2: second, 3: first})

    def steer(tally: Tally) -> tuple[Pair, ...]:
        return tuple(one.codecs for one in (second if tally.step == 1 else first))

    with chain(plan, agreed) as found:
        kept = keep_all(found)
        found.run(Given(steps), steer=steer)
    assert_same(parameters_of(found.stages), expected)
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=1e-6)
    with pytest.raises(AssertionError):
        assert_same(parameters_of(found.stages), in_one_graph(plan, agreed, first, steps)[0])
    for step in (2, 3, 4):
        with chain(plan, agreed) as resumed:
            states = take_up(resumed, kept, step)
            resumed.run(Given(steps), first_step=step, states=states, steer=steer)
        assert_same(parameters_of(resumed.stages), expected)
