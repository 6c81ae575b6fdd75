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
    ("override", "what", "cure"),
    [
        ("cloud.wset.ranks=4", "cloud has no entry 'wset'", "did you mean 'west'?"),
        ("cloud.2.ranks=4", "cloud has no entry '2'", "choose from east, west"),
        ("cloud.-1.ranks=4", "cloud has no entry '-1'", "choose from east, west"),
        ("link.east-north.rtt=1 s", "link has no entry 'east-north'", "choose from east-west"),
        ("name.x=1", "name is not a table", "set it as a whole"),
        ("cloud.west.name.x=1", 'cloud "west": name is not a table', "set it as a whole"),
        ("train.steps", "is not of the form key=value", "write for example train.steps=10"),
        ("train..steps=1", "is not of the form key=value", "write for example train.steps=10"),
        ("=1", "is not of the form key=value", "write for example train.steps=10"),
    ],
)
def test_overrides_without_a_place(override: str, what: str, cure: str) -> None:
    assert problems(override) == (Problem(key=f"--set {override}", what=what, cure=cure),)


@pytest.mark.parametrize(
    ("override", "key", "what", "cure"),
    [
        ("train.step=10", "train.step", "is not a known key", "did you mean 'steps'?"),
        ("trian.steps=10", "trian", "is not a known key", "did you mean 'train'?"),
        (
            "train.steps=ten",
            "train.steps",
            "must be a whole number, not 'ten'",
            "for example steps = 1000",
        ),
        ("cloud.0.ranks=0", 'cloud "east": ranks', "must be at least 1, not 0", "for example ranks = 8"),
        (
            "cloud.west.listen=127.0.0.1:7600",
            'cloud "west": listen',
            "cloud 'east' listens at 127.0.0.1:7600 too",
            "give each cloud its own host or port",
        ),
    ],
)
def test_errors_from_an_override_say_so(override: str, key: str, what: str, cure: str) -> None:
    assert problems(override) == (Problem(key=key, what=f"{what} (from --set {override})", cure=cure),)


def test_errors_of_the_file_are_not_blamed_on_overrides() -> None:
    text = EXAMPLE.read_text() + "jitter = 3\n[train]\nsteps = 0\n"
    with pytest.raises(JobError) as caught:
        parse_job(text, file=EXAMPLE, overrides=["train.batch_tokens=1", "link.0.rtt=soon", "x"])
    whats = {problem.key: problem.what for problem in caught.value.problems}
    assert whats["train.steps"] == "must be at least 1, not 0"
    assert whats['link "east-west": rtt'].endswith("(from --set link.0.rtt=soon)")
    assert "--set" not in whats['link "east-west": jitter']
    assert whats["--set x"] == "is not of the form key=value"


def test_the_cause_is_the_override_nearest_to_the_place() -> None:
    found = {problem.key: problem.what for problem in problems("train.steps=0", "train.batch_tokens=0")}
    assert found["train.steps"].endswith("(from --set train.steps=0)")
    assert found["train.batch_tokens"].endswith("(from --set train.batch_tokens=0)")


def test_the_cause_is_the_last_override_of_a_place() -> None:
    (problem,) = problems("seed=one", "seed=two")
    assert problem.what == "must be a whole number, not 'two' (from --set seed=two)"


def test_an_empty_list_has_no_entries() -> None:
    text = 'name = "x"\nlink = []\n[[cloud]]\nname = "solo"\n'
    with pytest.raises(JobError) as caught:
        parse_job(text, file=EXAMPLE, overrides=["link.0.rtt=1 s"])
    assert caught.value.problems[0].cure == "there is nothing to choose from"


def test_a_link_name_that_fits_two_links_needs_a_number() -> None:
    text = """
name = "x"
cloud = [{name = "a", listen = "h:1"}, {name = "b-c"}, {name = "a-b", listen = "h:2"}, {name = "c"}]
link = [{between = ["a", "b-c"]}, {between = ["a-b", "c"]}]
"""
    with pytest.raises(JobError) as caught:
        parse_job(text, file=EXAMPLE, overrides=["link.a-b-c.rtt=1 s"])
    assert caught.value.problems[0].what == "'a-b-c' names several entries of link"
    assert parse_job(text, file=EXAMPLE, overrides=["link.1.rtt=1 s"]).link[1].rtt_s == 1.0
