"""Measuring on the device at hand: every part has its time, and plans can rest on the file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.errors import UserError
from isthmus.job.load import parse_job
from isthmus.model.blueprint import Blueprint
from isthmus.plan.costs import Precision, Workload
from isthmus.plan.times import Profile, measured_times, read_profile, write_profile
from isthmus.train.profiling import (
    Effort,
    Rig,
    _parts,
    _stages,
    made_up_blueprint,
    measure,
    repeat,
    require_certain,
    sizes_of,
)
from tests.plan.sizes import estimated

FEW = Effort(least_rounds=2, most_rounds=3, size_s=10.0, rehearsal_s=0.0)

JOB = """
name = "small"
[model.config]
{config}
[data]
source = "builtin:tales"
sequence_length = 16
task = "{task}"
[[cloud]]
name = "east"
device = "cpu"
[strategy]
kind = "pipeline"
microbatches = {microbatches}
[train]
batch_tokens = 64
"""
LLAMA = """
model_type = "llama"
vocab_size = 64
hidden_size = 16
intermediate_size = 24
num_attention_heads = 2
num_hidden_layers = {layers}
"""
QWEN = """
model_type = "qwen2"
vocab_size = 64
hidden_size = 16
intermediate_size = 24
num_attention_heads = 2
num_key_value_heads = 2
num_hidden_layers = 5
use_sliding_window = true
sliding_window = 4
max_window_layers = 3
"""
BERT = """
model_type = "bert"
vocab_size = 64
hidden_size = 16
intermediate_size = 24
num_attention_heads = 2
num_hidden_layers = 4
"""


def measured(config: str, *, task: str = "causal-lm", microbatches: int = 2) -> Profile:
    text = JOB.format(config=config, task=task, microbatches=microbatches)
    job = parse_job(text, file=Path("job.toml"))
    return measure(job, job.cloud[0], effort=FEW)


def test_every_size_and_layer_is_measured_and_can_be_planned_with(tmp_path: Path) -> None:
    found = measured(LLAMA.format(layers=4))
    assert found.device == "cpu"
    assert found.model_type == "llama"
    assert [one.num_sequences for one in found.samples] == [1, 2]
    assert all(len(one.layers) == 4 for one in found.samples)
    assert all(one.precision is Precision.FLOAT32 for one in found.samples)
    assert found.update_s_per_parameter > 0
    assert found.to_host_bytes_per_s is None
    (tmp_path / "one.json").write_text(write_profile(found))
    again = read_profile(tmp_path / "one.json")
    assert again == found
    workload = Workload(num_sequences=2, sequence_length=16)
    times = measured_times(again, estimated(num_hidden_layers=4).costs(workload))
    assert times.stage(range(4)).forward_s > times.stage(range(1, 3)).forward_s > 0


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_few_layers_are_enough(num_layers: int) -> None:
    (found,) = measured(LLAMA.format(layers=num_layers), microbatches=4).samples
    assert len(found.layers) == num_layers
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in found.layers)


def test_parts_are_told_apart_by_the_times_of_stages() -> None:
    plan = blueprint_of_text(QWEN)
    embedding, head, beside, full, sliding = 5.0, 7.0, 1.0, 2.0, 1.5
    layers = [full, full, full, sliding, sliding]
    stages = _stages(plan)
    totals = [
        beside + sum(layers[index] for index in one) + embedding * (one.start == 0) + head * (one.stop == 5)
        for one in stages
    ]
    found = _parts(plan, stages, np.array([[total, 2 * total, 0.0, 0.0] for total in totals]))
    assert [one.forward_s for one in found["layers"]] == pytest.approx(layers)
    assert found["embedding"].backward_s == pytest.approx(2 * embedding)
    assert [found[name].forward_s for name in ("head", "beside")] == pytest.approx([head, beside])
    # A stage of two layers that took less than one of them: no layer is taken to cost nothing.
    totals[-1] = 0.5 * totals[1]
    found = _parts(plan, stages, np.array([[total, total, 0.0, 0.0] for total in totals]))
    assert all(one.forward_s > 0 for one in found["layers"])


def blueprint_of_text(config: str) -> Blueprint:
    text = JOB.format(config=config, task="causal-lm", microbatches=2)
    return made_up_blueprint(parse_job(text, file=Path("job.toml")))


def test_layers_of_two_kinds_are_measured_apart() -> None:
    found = measured(QWEN, microbatches=4).samples[0]
    assert found.layers[0] == found.layers[1] == found.layers[2]
    # The last two see a window of four tokens.
    assert found.layers[3] == found.layers[4] != found.layers[0]


@pytest.mark.parametrize(
    "task", ["masked-lm", "sequence-classification", "token-classification", "question-answering"]
)
def test_every_head_is_fed(task: str) -> None:
    (found,) = measured(BERT, task=task, microbatches=4).samples
    assert found.head.forward_s >= 0
    assert found.layers[1].backward_s > 0


def test_a_job_without_a_model_is_refused() -> None:
    job = parse_job('name = "none"\n[[cloud]]\nname = "east"\n', file=Path("job.toml"))
    with pytest.raises(UserError, match=r"no \[model\]"):
        measure(job, job.cloud[0])


def test_a_rig_holds_weights_and_moments() -> None:
    from isthmus.model.load import build_stage
    from isthmus.train.device import Device
    from isthmus.train.profiling import Size
    from tests.model.cases import blueprint

    size: Any = Size(num_sequences=1, sequence_length=8, precision=Precision.FLOAT32)
    rig = Rig(build_stage(blueprint("llama"), range(1, 2), seed=0), device=Device("cpu"), size=size)
    num_parameters = sum(one.numel() for one in rig.stage.parameters())
    assert rig.held_bytes() == 4 * num_parameters
    rig.forward(0)
    rig.backward(0)
    rig.update()
    assert rig.held_bytes() == pytest.approx(12 * num_parameters, rel=0.02)


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rounds_of(figures: list[float], *, round_s: float = 0.125, **changes: Any) -> int:
    """How many rounds are taken of these figures, over and over."""
    clock, effort = FakeClock(), replace(EFFORT, **changes)
    taken = iter(figures * 100)

    def take() -> float:
        clock.now_s += round_s
        return next(taken)

    return len(repeat(take, figure=lambda one: one, effort=effort, clock=clock))


EFFORT = Effort(least_rounds=4, most_rounds=20, size_s=1.0, rehearsal_s=1.0)


def test_figures_that_agree_are_taken_a_few_times() -> None:
    assert rounds_of([1.0, 1.01]) == 4


def test_figures_that_scatter_are_taken_until_the_time_is_over() -> None:
    assert rounds_of([1.0, 2.0, 3.0]) == 8
    assert rounds_of([1.0, 2.0, 3.0], size_s=100.0) == 20
    assert rounds_of([1.0, 2.0, 3.0], round_s=5.0) == 4


def test_scattered_figures_are_refused_with_a_cure() -> None:
    found = measured(LLAMA.format(layers=1), microbatches=4)
    require_certain(replace(found, scatter=0.2))
    with pytest.raises(UserError, match="certain to 30% only") as caught:
        require_certain(replace(found, scatter=0.3))
    assert caught.value.hint is not None
    assert "--no-profile" in caught.value.hint


def test_open_micro_batches_are_measured_at_sizes_far_apart() -> None:
    text = JOB.format(config=LLAMA.format(layers=2), task="causal-lm", microbatches=2)
    job = parse_job(text, file=Path("job.toml"))
    assert sizes_of(job) == [1, 2]
    free = parse_job(text.replace("microbatches = 2", ""), file=Path("job.toml"))
    assert sizes_of(free) == [1, 4]


def test_codecs_of_the_job_are_measured_both_ways() -> None:
    text = JOB.format(config=LLAMA.format(layers=2), task="causal-lm", microbatches=4)
    text += '[[cloud]]\nname = "west"\nlisten = "127.0.0.1:7600"\ndevice = "cpu"\n'
    text += '[[link]]\nbetween = ["east", "west"]\ncodec = "auto"\n'
    job = parse_job(text, file=Path("job.toml"))
    found = measure(job, job.cloud[0], effort=FEW)
    texts = [one.codec for one in found.codings]
    assert texts[:2] == ["raw", "bf16"]
    assert "rotate | int8(stochastic)" in texts
    assert all(one.encode_s(64) > 0 and one.decode_s(64) > 0 for one in found.codings)
