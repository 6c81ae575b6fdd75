"""Measuring on the device at hand: every part has its time, and plans can rest on the file."""

from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import UserError
from isthmus.job.load import parse_job
from isthmus.plan.costs.activations import Precision
from isthmus.plan.costs.parts import Workload
from isthmus.plan.costs.profile import Profile, read_profile, write_profile
from isthmus.plan.costs.times import measured_times
from isthmus.train.profiling import Effort, Rig, measure

FEW = Effort(least_rounds=2, most_rounds=3, size_s=0.0, round_s=10.0, rehearsal_s=0.0)

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
    times = measured_times(again, Workload(num_sequences=2, sequence_length=16), num_layers=4)
    assert times.stage(range(4)).forward_s > times.stage(range(1, 3)).forward_s > 0


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_few_layers_are_enough(num_layers: int) -> None:
    (found,) = measured(LLAMA.format(layers=num_layers), microbatches=4).samples
    assert len(found.layers) == num_layers
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in found.layers)


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
