"""Bytes of a plan against what real stages, packets and runs put on the line."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from isthmus.job.codec import parse_codec
from isthmus.model.blueprint import Blueprint, fresh_blueprint, split_layers
from isthmus.model.costs import MeasuredModel, Training
from isthmus.model.heads import HEADS
from isthmus.model.stage import Batch, StageInput
from isthmus.plan.codecs import Crossing, Pair
from isthmus.plan.costs import (
    Arithmetic,
    Messages,
    Precision,
    Task,
    framed_bytes,
    integer_bytes,
    stream_bytes,
)
from isthmus.plan.plan import Plan
from isthmus.plan.planner import plan
from isthmus.plan.types import Carried, MessageKind, Sent
from isthmus.wan.packet import wire_bytes
from tests.model.cases import CONFIGS, RNG_KEY, blueprint, build, make_batch
from tests.plan.jobs import two_clouds
from tests.train.chain import CutCase, Given, chain, config
from tests.train.wires import Joined

ACTIVATION, GRADIENT = MessageKind.ACTIVATION, MessageKind.GRADIENT
CODED = Pair(forward=parse_codec("rotate | int4"), backward=parse_codec("rotate | int4(stochastic)"))
WIDTH = 64

ON_CPU = Arithmetic(precision=Precision.BFLOAT16, on_accelerator=False)
ON_GPU = Arithmetic(precision=Precision.BFLOAT16)
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
NUM_MICROBATCHES, NUM_SEQUENCES, LENGTH = 4, 2, 128


@functools.cache
def messages(model_type: str) -> Messages:
    return MeasuredModel(blueprint(model_type), Training()).table.messages


@pytest.mark.parametrize("sharded", [(False, False), (True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize(
    "model_type", [one if one == "llama" else pytest.param(one, marks=pytest.mark.slow) for one in CONFIGS]
)
def test_the_type_of_what_crosses_is_that_of_a_real_stage(model_type: str, sharded: tuple[bool, ...]) -> None:
    real = blueprint(model_type)
    stages = build(real, split_layers(real.num_layers, 3), untie=True)
    batch, crossing, is_narrow = make_batch(real.head), None, None
    for stage, is_sharded in zip(stages[:-1], sharded, strict=True):
        # Weights that are shared out are gathered in bfloat16.
        if is_sharded:
            stage.to(torch.bfloat16).stream_dtype = torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            output = stage(StageInput(batch=batch, crossing=crossing, rng_key=RNG_KEY))
        assert output.crossing is not None
        crossing = output.crossing.detach()
        is_narrow = messages(model_type).leave_narrow(ON_CPU, is_sharded=is_sharded, arrived_narrow=is_narrow)
        assert crossing.element_size() == stream_bytes(is_narrow=is_narrow)


def test_norms_of_encoders_stay_wide_on_accelerators() -> None:
    assert not messages("bert").leave_narrow(ON_GPU, is_sharded=True)
    assert messages("gpt2").leave_narrow(ON_GPU, is_sharded=True)
    assert not messages("gpt2").leave_narrow(Arithmetic(), is_sharded=True)


@pytest.mark.parametrize("num_bytes", [0, 1, 16384, 16385, 10**6])
def test_framing_is_that_of_the_link(num_bytes: int) -> None:
    assert framed_bytes(num_bytes) == wire_bytes(num_bytes)


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "token-classification"])
@pytest.mark.parametrize("vocab_size", [200, 30_000, 150_000])
def test_integers_and_headers_are_those_of_real_packets(vocab_size: int, task: str) -> None:
    ids = torch.randint(0, vocab_size, (8, 512))
    ids[0, :2] = torch.tensor([0, vocab_size - 1])
    labels = {
        "causal-lm": ids,
        "masked-lm": ids.masked_fill(torch.rand(ids.shape) > 0.15, -100).scatter(
            1, torch.zeros(8, 1).long(), -100
        ),
        "token-classification": ids % 5,
    }[task]
    integers = {"ids": ids, "labels": labels, "targets": torch.tensor([3210, 98765])}
    hidden = torch.randn(*ids.shape, WIDTH)
    codecs = (("hidden", str(CODED.forward)), ("gradient", str(CODED.backward)))
    with Joined(config(2, 64, cuts=(CutCase(codecs=CODED),)), hidden_width=WIDTH) as wires:
        about: dict[str, Any] = {"step": 1234, "item": 56}
        down, stream, packet = wires.before.send(
            ACTIVATION, {**integers, "hidden": hidden}, codecs=codecs, **about
        )
        wires.behind.receive(stream, packet)
        up, *_ = wires.behind.send(
            GRADIENT, {"hidden": hidden}, codecs=(("hidden", str(CODED.backward)),), **about
        )
    found = Messages(integer_bytes=integer_bytes(vocab_size, Task(task)))
    crossing = Crossing(num_rows=ids.numel(), width=WIDTH)
    expected = found.forward_bytes(CODED.forward_bytes(crossing), num_tokens=ids.numel())
    assert on_line(down) == pytest.approx(expected, abs=64)
    assert on_line(up) == pytest.approx(found.backward_bytes(CODED.backward_bytes(crossing)), abs=64)


def on_line(sent: Sent) -> int:
    assert isinstance(sent.facts, Carried)
    return sent.facts.num_bytes


@pytest.mark.parametrize(
    ("precision", "num_stages", "codec"),
    [
        (Precision.FLOAT32, 2, "raw"), (Precision.BFLOAT16, 3, "raw"),
        (Precision.FLOAT32, 3, "rotate | int8"), (Precision.BFLOAT16, 2, "rotate | int8"),
    ],
)  # fmt: skip
def test_a_run_sends_what_was_planned(precision: Precision, num_stages: int, codec: str) -> None:
    model = fresh_blueprint(TINY, head=HEADS["causal-lm"])
    pair = Pair(forward=parse_codec(codec), backward=parse_codec(codec))
    cuts = (CutCase(codecs=pair),) * (num_stages - 1)
    with chain(model, config(num_stages, NUM_MICROBATCHES, num_steps=2, cuts=cuts)) as found:
        autocast = torch.bfloat16 if precision is Precision.BFLOAT16 else None
        found.run(Given(steps(model)), autocast=autocast)
    sent_bytes = sum(record.steps[-1].num_bytes for record in found.records)
    planned = planned_tiny(f"train.precision={precision.value}", f"link.0.codec={codec}")
    assert (num_stages - 1) * planned.estimate.wan_bytes == pytest.approx(sent_bytes, rel=0.002)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_ranks_that_share_a_stage_out_send_half(codec: str) -> None:
    copies, shared = (
        planned_tiny(
            "train.precision=bfloat16",
            f"link.0.codec={codec}",
            *(f"cloud.{name}.ranks=2" for name in ("east", "west")),
            *(f"cloud.{name}.sharding={sharding}" for name in ("east", "west")),
        )
        for sharding in ("none", "optimizer")
    )
    halves = 2 if codec == "raw" else 1
    assert copies.links[0].up_bytes == pytest.approx(halves * shared.links[0].up_bytes, rel=0.01)


def test_what_a_bottleneck_sends_is_float32() -> None:
    shared = [f"cloud.{name}.{key}" for name in ("east", "west") for key in ("ranks=2", "sharding=optimizer")]
    planned = planned_tiny("train.precision=bfloat16", "link.0.boundary=bottleneck(8, warmup=20)", *shared)
    num_tokens = NUM_MICROBATCHES * NUM_SEQUENCES * LENGTH
    assert planned.links[0].up_bytes == pytest.approx(4 * 8 * num_tokens, rel=0.05)


def steps(model: Blueprint) -> list[list[Batch]]:
    """Whole sequences, in which labels are the ids."""
    ids = torch.randint(0, TINY["vocab_size"], (2, NUM_MICROBATCHES, NUM_SEQUENCES, LENGTH))
    return [[_batch(model, one) for one in step] for step in ids]


def _batch(model: Blueprint, ids: torch.Tensor) -> Batch:
    return Batch(ids=ids, labels=ids, num_targets=model.head.num_targets(ids))


def planned_tiny(*overrides: str) -> Plan:
    keys = [f"model.config.{key}={value}" for key, value in TINY.items()]
    given: Sequence[str] = (
        f"data.sequence_length={LENGTH}",
        f"train.batch_tokens={NUM_MICROBATCHES * NUM_SEQUENCES * LENGTH}",
        "strategy.kind=pipeline",
        f"strategy.microbatches={NUM_MICROBATCHES}",
        "link.0.codec=raw",
    )
    return plan(two_clouds(*keys, *given, *overrides), is_quick=True)
