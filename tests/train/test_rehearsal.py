"""Clouds that share a machine: what a rehearsal adds to the parts, and that noise tells no clouds apart."""

from dataclasses import replace

import pytest

from isthmus.plan.costs import Precision
from isthmus.plan.simulated import simulate_scenario
from isthmus.plan.times import PassTimes, Profile, Sample
from isthmus.train.profiling import Effort
from isthmus.train.rehearsal import (
    Rehearsal,
    rehearsed_layers,
    rehearsed_scenario,
    rehearsed_sizes,
    stretch_all,
)

CLOUDS = ("east", "west")
EFFORT = Effort(least_rounds=2, most_rounds=3, size_s=1.0, rehearsal_s=2.0)


def sample(num_sequences: int, layer_s: float) -> Sample:
    layer = PassTimes(forward_s=layer_s, backward_s=2 * layer_s)
    return Sample(
        num_sequences=num_sequences,
        sequence_length=8,
        precision=Precision.FLOAT32,
        embedding=PassTimes(forward_s=0.001, backward_s=0.0),
        layers=(layer,) * 4,
        head=layer,
    )


def profile(scale: float = 1.0) -> Profile:
    return Profile(
        device="cpu", model_type="llama", samples=(sample(1, 0.01 * scale), sample(4, 0.03 * scale))
    )


def whole_s(one: Sample) -> float:
    times = one.stage(range(4))
    return times.forward_s + times.backward_s


def test_times_are_stretched_until_the_simulator_gives_what_the_rehearsal_took() -> None:
    profiles = dict.fromkeys(CLOUDS, profile())
    quiet = Rehearsal(num_sequences=1, num_microbatches=6, step_s=1.0)
    expected_s = simulate_scenario(rehearsed_scenario(quiet, profiles), num_steps=3).steps[-1].duration_s
    found = stretch_all(profiles, [replace(quiet, step_s=1.5 * expected_s)])
    again = simulate_scenario(rehearsed_scenario(quiet, found), num_steps=3).steps[-1].duration_s
    assert again == pytest.approx(1.5 * expected_s)
    # The larger size was not rehearsed: what is added to its passes is as long as for the nearest.
    added_s = [sum(whole_s(one) for one in each.samples[1:]) for each in (found["east"], profiles["east"])]
    assert added_s[0] - added_s[1] == pytest.approx(0.5 * whole_s(profile().samples[0]))


def test_without_a_rehearsal_times_are_as_measured() -> None:
    assert stretch_all({"east": profile()}, ()) == {"east": profile()}


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (4, 2, [range(2), range(2, 4)]),
        (32, 2, [range(4), range(28, 32)]),
        (32, 4, [range(4), range(8, 12), range(16, 20), range(28, 32)]),
        (2, 2, [range(1), range(1, 2)]),
    ],
)
def test_a_few_layers_are_rehearsed_with_the_ends_of_the_model(
    num_layers: int, num_stages: int, expected: list[range]
) -> None:
    assert list(rehearsed_layers(num_layers, num_stages)) == expected


def test_large_sizes_are_not_rehearsed_but_one_always_is() -> None:
    samples = [sample(1, 0.001), sample(4, 0.004), sample(16, 10.0)]
    assert list(rehearsed_sizes(samples, range(2), EFFORT)) == [1, 4]
    assert list(rehearsed_sizes(samples[2:], range(2), EFFORT)) == [16]
