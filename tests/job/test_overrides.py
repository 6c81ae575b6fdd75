"""Changes from the command line."""

from pathlib import Path

import pytest

from isthmus.errors import JobError, Problem
from isthmus.job import Job, PipelineStrategy, load_job
from isthmus.job.load import parse_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "two-clouds.toml"


def load(*overrides: str) -> Job:
    return load_job(EXAMPLE, overrides=overrides)


def problems(*overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(JobError) as caught:
        load(*overrides)
    return caught.value.problems


@pytest.mark.parametrize("path", ["link.0", "link.east-west", "link.west-east"])
@pytest.mark.parametrize("value", ['"10 Mbps"', "10 Mbps", "10Mbps"])
def test_links_by_number_or_by_their_clouds(path: str, value: str) -> None:
    assert load(f"{path}.bandwidth={value}").link[0].bandwidth_bps == (10e6, 10e6)


@pytest.mark.parametrize("path", ["cloud.1", "cloud.west"])
def test_clouds_by_number_or_name(path: str) -> None:
    assert load(f"{path}.ranks=4").cloud[1].ranks == 4


def test_sections_that_the_file_lacks() -> None:
    job = load("train.steps=10", "train.batch_tokens=64", "model.config.layers=2", "seed=3")
    assert (job.train.steps, job.train.batch_tokens, job.seed) == (10, 64, 3)
    assert job.model is not None
    assert job.model.config == {"layers": 2}


def test_values_are_toml_else_text() -> None:
    job = load("name=other", 'link.0.bandwidth=["1 Gbps", "2 Gbps"]', 'link.0.codec={forward="fp16"}')
    assert job.name == "other"
    assert job.link[0].bandwidth_bps == (1e9, 2e9)
    assert str(job.link[0].codec.forward) == "fp16"


def test_entries_of_plain_lists() -> None:
    job = load('link.0.bandwidth=["1 Gbps", "2 Gbps"]', "link.0.bandwidth.1=3 Gbps")
    assert job.link[0].bandwidth_bps == (1e9, 3e9)


def test_the_last_override_wins() -> None:
    assert load("seed=1", "seed=2").seed == 2


def test_a_value_may_hold_an_equals_sign() -> None:
    assert str(load("link.0.codec=int4(group=32)").link[0].codec.forward) == "int4(group=32)"


def test_a_line_break_brings_no_further_key() -> None:
    (problem,) = problems("seed=1\nname='x'")
    assert problem.key == "seed"


def test_strategy_by_kind() -> None:
    job = load("strategy.kind=pipeline", "strategy.microbatches=4")
    assert job.strategy == PipelineStrategy(kind="pipeline", microbatches=4)


@pytest.mark.parametrize(
    "override",
    [
        *("cloud.wset.ranks=4", "cloud.2.ranks=4", "cloud.-1.ranks=4", "link.east-north.rtt=1 s"),
        *("name.x=1", "cloud.west.name.x=1", "train.steps", "train..steps=1", "=1"),
    ],
)
def test_overrides_without_a_place(override: str) -> None:
    (problem,) = problems(override)
    assert problem.key == f"--set {override}"
    assert problem.what
    assert problem.cure


def test_a_mistyped_entry_is_suggested() -> None:
    (problem,) = problems("cloud.wset.ranks=4")
    assert problem.cure == "did you mean 'west'?"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.step=10", "train.step"),
        ("trian.steps=10", "trian"),
        ("train.steps=ten", "train.steps"),
        ("cloud.0.ranks=0", 'cloud "east": ranks'),
        ("cloud.west.listen=127.0.0.1:7600", 'cloud "west": listen'),
    ],
)
def test_errors_from_an_override_say_so(override: str, key: str) -> None:
    (problem,) = problems(override)
    assert problem.key == key
    assert problem.what.endswith(f" (from --set {override})")
    assert problem.cure


def test_errors_of_the_file_are_not_blamed_on_overrides() -> None:
    text = EXAMPLE.read_text() + "jitter = 3\n[train]\nsteps = 0\n"
    with pytest.raises(JobError) as caught:
        parse_job(text, file=EXAMPLE, overrides=["train.batch_tokens=1", "link.0.rtt=soon", "x"])
    whats = {problem.key: problem.what for problem in caught.value.problems}
    assert "--set" not in whats["train.steps"]
    assert whats['link "east-west": rtt'].endswith("(from --set link.0.rtt=soon)")
    assert "--set" not in whats['link "east-west": jitter']
    assert "--set x" in whats


def test_the_cause_is_the_override_nearest_to_the_place() -> None:
    found = {problem.key: problem.what for problem in problems("train.steps=0", "train.batch_tokens=0")}
    assert found["train.steps"].endswith("(from --set train.steps=0)")
    assert found["train.batch_tokens"].endswith("(from --set train.batch_tokens=0)")


def test_the_cause_is_the_last_override_of_a_place() -> None:
    (problem,) = problems("seed=one", "seed=two")
    assert problem.what.endswith("'two' (from --set seed=two)")


def test_an_empty_list_has_no_entries() -> None:
    text = 'name = "x"\nlink = []\n[[cloud]]\nname = "solo"\n'
    with pytest.raises(JobError) as caught:
        parse_job(text, file=EXAMPLE, overrides=["link.0.rtt=1 s"])
    assert caught.value.problems[0].cure


def test_a_link_name_that_fits_two_links_needs_a_number() -> None:
    text = """
name = "x"
cloud = [{name = "a", listen = "h:1"}, {name = "b-c"}, {name = "a-b", listen = "h:2"}, {name = "c"}]
link = [{between = ["a", "b-c"]}, {between = ["a-b", "c"]}]
"""
    with pytest.raises(JobError) as caught:
        parse_job(text, file=EXAMPLE, overrides=["link.a-b-c.rtt=1 s"])
    assert "several" in caught.value.problems[0].what
    assert parse_job(text, file=EXAMPLE, overrides=["link.1.rtt=1 s"]).link[1].rtt_s == 1.0
