"""Passes cost `fixed + per token`: launches on accelerators, calls on a CPU, lines through measured times."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.job.codec import parse_codec
from isthmus.plan.costs import Arithmetic, ModelCosts, Precision, Workload
from isthmus.plan.job_facts import cloud_facts, is_loopback
from isthmus.plan.plan import PipelineSettings
from isthmus.plan.planner import plan
from isthmus.plan.times import (
    CATALOGUE,
    LAYER_LAUNCH_S,
    CodingTimes,
    PassTimes,
    Profile,
    Sample,
    coding_s,
    estimated_times,
    fit_line,
)
from tests.plan.jobs import two_clouds
from tests.plan.sizes import estimated

H200 = CATALOGUE["h200"]
# The job that was planned with 256 micro-batches of one sequence: launches were free.
LAUNCHES = (
    "model.config.num_hidden_layers=16",
    "cloud.east.accelerator=h200",
    "cloud.west.accelerator=h200",
    "link.0.rtt=60 ms",
    "train.batch_tokens=262144",
    "strategy.kind=pipeline",
)


def costs_of(num_sequences: int) -> ModelCosts:
    model = estimated(hidden_size=2048, num_hidden_layers=8)
    arithmetic = Arithmetic(precision=Precision.BFLOAT16)
    return model.costs(Workload(num_sequences=num_sequences, sequence_length=128, arithmetic=arithmetic))


def test_a_small_micro_batch_takes_as_long_as_its_launches() -> None:
    small = estimated_times(costs_of(1), H200).stage(range(1, 7))
    assert small.whole_forward_s == pytest.approx(6 * LAYER_LAUNCH_S)
    assert small.whole_backward_s == pytest.approx(12 * LAYER_LAUNCH_S)
    large = estimated_times(costs_of(512), H200).stage(range(1, 7))
    assert large.whole_forward_s == large.forward_s > small.whole_forward_s


def test_compiled_layers_launch_in_a_fraction() -> None:
    eager, compiled = (
        estimated_times(costs_of(1), H200, is_compiled=one).layers[0].whole_forward_s for one in (False, True)
    )
    assert compiled == pytest.approx(eager / 4)


def test_on_a_cpu_calls_and_arithmetic_add_up() -> None:
    cpu = CATALOGUE["cpu"]
    one, free = (
        estimated_times(costs_of(1), each).layers[0] for each in (cpu, replace(cpu, eager_launch_s=0.0))
    )
    assert one.forward_s == pytest.approx(free.forward_s + cpu.eager_launch_s)
    assert one.forward_launch_s == 0.0


def test_plans_no_longer_take_micro_batches_of_one_sequence_where_launches_dominate() -> None:
    found = plan(two_clouds(*LAUNCHES))
    assert isinstance(found.settings, PipelineSettings)
    assert found.settings.num_microbatches < 256
    forced = plan(two_clouds(*LAUNCHES, "strategy.microbatches=256"))
    # 256 times eight layers, three launches each.
    assert forced.estimate.step_s > 256 * 8 * 3 * LAYER_LAUNCH_S > found.estimate.step_s


def test_a_shared_device_is_divided() -> None:
    half = H200.shared_by(2)
    assert half.flops == H200.flops / 2
    assert half.memory_bytes == H200.memory_bytes // 2
    assert half.eager_launch_s == H200.eager_launch_s
    assert H200.shared_by(1) is H200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("10.0.0.5", False),
        ("east.example.com", False),
    ],
)
def test_addresses_of_this_machine_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


@given(fixed=st.floats(0, 10), slope=st.floats(0.01, 10))
def test_a_line_is_found_again(fixed: float, slope: float) -> None:
    points = [(size, fixed + slope * size) for size in (1.0, 4.0, 16.0)]
    assert fit_line(points) == pytest.approx((fixed, slope), abs=1e-6)


def test_noise_makes_no_time_negative() -> None:
    assert fit_line([(1.0, 2.0), (4.0, 1.0)])[1] == 0.0
    fixed, slope = fit_line([(1.0, 0.5), (4.0, 4.0)])
    assert fixed == 0.0
    assert 0.5 < slope <= 1.0
    assert fit_line([(4.0, 2.0)]) == (0.0, 0.5)


def layered(num_sequences: int, layer_s: float) -> Sample:
    one = PassTimes(forward_s=layer_s, backward_s=2 * layer_s)
    return Sample(
        num_sequences=num_sequences,
        sequence_length=8,
        precision=Precision.FLOAT32,
        embedding=one,
        layers=(one,),
        head=one,
    )


def test_noise_between_two_sizes_is_not_carried_far() -> None:
    """The last two sizes alone would say that 64 sequences take 0.1 s, as many as 8 do."""
    samples = tuple(layered(size, time) for size, time in ((1, 0.012), (2, 0.025), (4, 0.1), (8, 0.1)))
    profile = Profile(device="cpu", model_type="llama", samples=samples)
    found = profile.sample(num_sequences=64, sequence_length=8, precision=Precision.FLOAT32)
    assert 0.6 < found.layers[0].forward_s < 1.6


def test_codecs_and_copies_are_as_measured() -> None:
    east, west = cloud_facts(two_clouds())
    codec = parse_codec("rotate | int4")
    guessed_s = coding_s(codec, 1000, 0, sender=east, receiver=west)
    measured = CodingTimes(
        codec="rotate | int4",
        encode_fixed_s=0.1,
        encode_s_per_element=0.001,
        decode_fixed_s=0.2,
        decode_s_per_element=0.002,
    )
    profile = Profile(
        device="x",
        model_type="llama",
        samples=(layered(1, 1.0),),
        codings=(measured,),
        to_host_bytes_per_s=1e3,
        from_host_bytes_per_s=2e3,
    )
    known = [replace(one, profile=profile) for one in (east, west)]
    # What was measured has the copies in it.
    assert coding_s(codec, 1000, 1000, sender=known[0], receiver=known[1]) == pytest.approx(0.1 + 1 + 0.2 + 2)
    copied_s = coding_s(parse_codec("bf16"), 1000, 1000, sender=known[0], receiver=known[1])
    assert copied_s == pytest.approx(guessed_s + 1.0 + 0.5)
    assert coding_s(parse_codec("raw"), 1000, 0, sender=east, receiver=west) == 0.0
