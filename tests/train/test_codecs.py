"""A pipeline over links trains to the bit like one graph in which what crosses is coded."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import Aborted, FrameError
from isthmus.job.boundary import parse_boundary
from isthmus.job.codec import parse_codec
from isthmus.model.blueprint import Blueprint
from isthmus.plan.ladder import Pair
from isthmus.train.crossing.coded import Coded, as_buffer
from isthmus.train.crossing.cut import Cut
from tests.model.cases import blueprint
from tests.train.chain import SCHEDULE, WEIGHT_DECAY, Given, chain, course, make_stages
from tests.train.reference import assert_same, parameters_of, train_across
from tests.train.test_checkpoint import load_all, save_all
from tests.train.test_exactness import batches

CODECS = {
    "raw": ("raw", "raw"),
    "casts": ("bf16", "fp16"),
    "only back": ("raw", "int8(scale=tensor)"),
    "int8": ("rotate | int8", "rotate | int8"),
    "int4 stochastic": ("rotate | int4", "rotate | int4(stochastic)"),
    "int2": ("rotate | int2", "rotate | int4(stochastic)"),
    "topk": ("topk(0.5) | int8", "topk(0.5) | int8"),
    "svd": ("svd(0.6) | fp16", "svd(0.6) | fp16"),
    "subspace": ("subspace(6, every=2) | int8", "int8(stochastic)"),
    "anchored subspace": ("subspace(6, anchor=tokens, every=2) | int4", "int4(stochastic)"),
}
BOTTLENECK = "bottleneck(5, warmup=2)"


def cut(forward: str, backward: str, *, boundary: str = "hidden", **changes: Any) -> Cut:
    pair = Pair(forward=parse_codec(forward), backward=parse_codec(backward))
    return Cut(codecs=pair, boundary=parse_boundary(boundary), **changes)


def in_one_graph(plan: Blueprint, agreed: Any, steps: Any) -> tuple[dict[str, Any], list[float]]:
    stages = make_stages(plan, agreed)
    losses = train_across(
        stages,
        steps,
        cuts=agreed.cuts,
        seed=11,
        learning_rates=[SCHEDULE.at(step) for step in range(len(steps))],
        weight_decay=WEIGHT_DECAY,
        max_norm=0.5,
        num_warmup_steps=agreed.num_warmup_steps,
    )
    return parameters_of(stages), losses


@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
def test_every_codec(codecs: tuple[str, str]) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 4)
    agreed = course(3, 4, cuts=(cut(*codecs), cut(*codecs)))
    expected, losses = in_one_graph(plan, agreed, steps)
    with chain(plan, agreed) as found:
        found.run(Given(steps))
    assert_same(parameters_of(found.stages), expected)
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_bottlenecks_with_coded_numbers(num_stages: int) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 3)
    agreed = course(
        num_stages, 3, cuts=(cut("int4", "int4(stochastic)", boundary=BOTTLENECK),) * (num_stages - 1)
    )
    expected, _ = in_one_graph(plan, agreed, steps)
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
def test_a_resumed_run_equals_one_that_never_stopped(between: Cut, step: int, tmp_path: Path) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 3)
    agreed = course(3, 3, cuts=(between, between))
    with chain(plan, agreed) as whole:
        save_all(whole, tmp_path)
        whole.run(Given(steps))
    with chain(plan, agreed) as resumed:
        states = load_all(resumed, tmp_path, step)
        resumed.run(Given(steps), first_step=step, states=states)
    assert_same(parameters_of(resumed.stages), parameters_of(whole.stages))


def test_evaluation_is_done_with_codecs_and_without_and_leaves_no_trace() -> None:
    plan = blueprint("llama")
    steps, held_out = batches(plan, 2), batches(plan, 3, num_steps=1)[0]
    coded = (cut("subspace(6, every=2) | int2", "int8"),)
    agreed = course(2, 2, cuts=coded, evaluate_every=2, num_validation_microbatches=3, evaluates_plain=True)
    with chain(plan, agreed) as found:
        found.run(Given(steps, held_out))
    expected, _ = in_one_graph(plan, agreed, steps)
    assert_same(parameters_of(found.stages), expected)
    evaluations = found.records[0].evaluations
    assert [(one.step, one.is_plain) for one in evaluations] == [
        (step, is_plain) for step in (2, 4, 5) for is_plain in (False, True)
    ]
    assert len({one.num_targets for one in evaluations}) == 1
    assert all(one.loss != other.loss for one, other in pairwise(evaluations))


def test_coding_is_noted_and_what_crossed_is_counted() -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2, num_steps=2)
    with chain(plan, course(2, 2, num_steps=2, cuts=(cut("int8", "raw"),))) as found:
        found.run(Given(steps))
    north, east = found.records
    encoded = [span for span in north.spans if span.kind == "encode"]
    decoded = [span for span in east.spans if span.kind == "decode"]
    assert len(encoded) == len(decoded) == 4
    assert {span.track for span in encoded + decoded} == {"north→east"}
    num_tokens = sum(int(batch.mask.sum()) for step in steps for batch in step if batch.mask is not None)
    assert sum(span.num_bytes for span in encoded) == num_tokens * (16 + 2)
    sent = [sum(one.sent.num_elements for one in record.steps) for record in (north, east)]
    assert sent == [num_tokens * 16] * 2
    assert sum(one.sent.num_bytes for one in north.steps) < sum(one.sent.num_bytes for one in east.steps)


@pytest.mark.parametrize(
    "codecs", [("rotate | int4", "raw"), ("subspace(4) | int8", "int8"), ("raw", "int8")]
)
def test_a_payload_that_was_spoilt_ends_the_run(
    codecs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shortened(self: Coded) -> tuple[Any, ...]:
        return tuple(as_buffer(part[:-1]) for part in self.parts)

    plan = blueprint("llama")
    monkeypatch.setattr(Coded, "buffers", shortened)
    with (
        chain(plan, course(2, 2, cuts=(cut(*codecs),))) as found,
        pytest.raises((FrameError, Aborted)) as caught,
    ):
        found.run(Given(batches(plan, 2)))
    assert "bytes" in str(caught.value)


def test_ends_that_disagree_on_the_codec_are_found_out() -> None:
    plan = blueprint("llama")
    agreed = course(2, 2, cuts=(cut("int8", "int8"),))
    other = course(2, 2, cuts=(cut("int4", "int4"),))
    with chain(plan, agreed) as found, pytest.raises((FrameError, Aborted), match='where "int4" is due'):
        found.run(Given(batches(plan, 2)), courses={1: other})
