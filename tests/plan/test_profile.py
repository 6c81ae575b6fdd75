"""Profiles: the file, sizes between those measured, and what is wrong with one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.plan.costs import Arithmetic, ModelCosts, Precision, Workload
from isthmus.plan.job_facts import cloud_facts
from isthmus.plan.times import PassTimes, Profile, Sample, measured_times, read_profile, write_profile
from tests.plan.jobs import two_clouds
from tests.plan.sizes import estimated

NUM_LAYERS = 3


def times(forward_s: float) -> PassTimes:
    return PassTimes(forward_s=forward_s, backward_s=2 * forward_s)


def sample(num_sequences: int, scale: float) -> Sample:
    return Sample(
        num_sequences=num_sequences,
        sequence_length=128,
        precision=Precision.BFLOAT16,
        embedding=times(0.1 * scale),
        layers=tuple(times((1 + layer) * scale) for layer in range(NUM_LAYERS)),
        head=times(3 * scale),
        beside=times(0.01),
    )


PROFILE = Profile(
    device="NVIDIA H200",
    model_type="llama",
    samples=(sample(4, 4.0), sample(1, 1.5)),
    update_s_per_parameter=1e-11,
    to_host_bytes_per_s=5e10,
    from_host_bytes_per_s=4e10,
)


def costs(num_sequences: int, *, num_layers: int = NUM_LAYERS, **changes: Any) -> ModelCosts:
    one = Workload(
        num_sequences=num_sequences,
        sequence_length=128,
        arithmetic=Arithmetic(precision=Precision.BFLOAT16),
    )
    return estimated(num_hidden_layers=num_layers).costs(replace(one, **changes))


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(write_profile(PROFILE))
    assert read_profile(tmp_path / "one.json") == PROFILE


def test_a_short_hand_written_profile_will_do(tmp_path: Path) -> None:
    """Stages that sleep have no parts but layers."""
    nothing = {"forward_s": 0, "backward_s": 0}
    layer = {"forward_s": 0.01, "backward_s": 0.02}
    one = {
        "num_sequences": 1,
        "sequence_length": 64,
        "precision": "float32",
        "embedding": nothing,
        "layers": [layer, layer],
        "head": nothing,
    }
    text = json.dumps({"version": 2, "device": "sleep", "model_type": "none", "samples": [one]})
    (tmp_path / "one.json").write_text(text)
    found = measured_times(
        read_profile(tmp_path / "one.json"),
        costs(1, num_layers=2, sequence_length=64, arithmetic=Arithmetic()),
    )
    assert found.stage(range(2)) == PassTimes(forward_s=0.02, backward_s=0.04)
    assert found.update_s_per_parameter == 0


@given(num_sequences=st.integers(1, 64))
@settings(max_examples=30, deadline=None)
def test_sizes_between_lie_on_a_line(num_sequences: int) -> None:
    found = measured_times(PROFILE, costs(num_sequences))
    expected = 1.5 + (4.0 - 1.5) * (num_sequences - 1) / 3
    assert found.layers[1].forward_s == pytest.approx(2 * expected)
    assert found.head.backward_s == pytest.approx(6 * expected)
    assert found.beside.forward_s == pytest.approx(0.01)


def test_measured_sizes_are_as_measured() -> None:
    found = measured_times(PROFILE, costs(4))
    assert found.layers == PROFILE.samples[0].layers


def test_one_sample_scales_in_proportion() -> None:
    alone = replace(PROFILE, samples=(sample(4, 4.0),))
    found = measured_times(alone, costs(2))
    assert found.layers[0].forward_s == pytest.approx(2.0)


def test_a_stage_takes_its_parts_and_once_what_is_beside_them() -> None:
    found = measured_times(PROFILE, costs(4))
    assert found.stage(range(1, 2)).forward_s == pytest.approx(8.0 + 0.01)
    assert found.stage(range(3)).forward_s == pytest.approx(0.4 + 24.0 + 12.0 + 0.01)


def test_recomputing_adds_a_measured_forward() -> None:
    found = measured_times(PROFILE, costs(4, recompute=True))
    assert found.layers[0] == PassTimes(forward_s=4.0, backward_s=12.0)
    assert found.head == PROFILE.samples[0].head


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (costs(1, sequence_length=64), "no sequences of 64 tokens in bfloat16, only of 128 tokens"),
        (costs(1, arithmetic=Arithmetic()), "no sequences of 128 tokens in float32"),
        (costs(1, num_layers=4), "a model with 3 layers, not 4"),
    ],
)
def test_what_was_not_measured_is_refused(wanted: ModelCosts, message: str) -> None:
    with pytest.raises(UserError, match=message):
        measured_times(PROFILE, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "no profile of version 2 but of version 1, which an older release measured"),
        ({"samples": []}, "no valid profile: samples: .* at least 1"),
        ({"device": None, "samples": [{}]}, "no valid profile"),
        ({"update_s_per_parameter": -1}, "no valid profile: update_s_per_parameter: "),
        ({"samples": "many"}, "no valid profile"),
    ],
)
def test_a_broken_profile_is_one_sentence(change: dict[str, object], message: str, tmp_path: Path) -> None:
    values = {**json.loads(write_profile(PROFILE)), **change}
    (tmp_path / "one.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        read_profile(tmp_path / "one.json")


def test_a_missing_profile_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read") as caught:
        read_profile(tmp_path / "none.json")
    path = tmp_path / "none.json"
    assert caught.value.message == f"the profile {path} cannot be read: No such file or directory"
    assert caught.value.hint is not None
    assert "isthmus profile" in caught.value.hint


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"version": 2}'])
def test_a_job_that_names_what_is_no_profile_is_told_which_cloud_and_key(
    content: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "one.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        cloud_facts(two_clouds(f"cloud.west.profile={path}"))
    assert caught.value.message.startswith("cloud.west.profile cannot be used: ")
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint == f"measure it again: isthmus profile JOB --cloud west --out {path}"
