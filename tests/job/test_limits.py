"""Limits and accelerators of a job: units, bounds, and what is no part of the agreement between clouds."""

from pathlib import Path

import pytest

from isthmus.errors import JobError
from isthmus.job import Job, PipelineStrategy
from isthmus.job.load import dump_job, parse_job

BASE = 'name = "x"\n[[cloud]]\nname = "east"\naccelerator = "mine"\nprofile = "east.json"\n'
LIMITS = '[limits]\ndeadline = "3 d"\nbudget_usd = 500\ncodec_loss = "none"\nmemory_share = 0.8\n'
ACCELERATOR = (
    '[[accelerator]]\nname = "mine"\nflops = "989 TFLOPS"\nmemory = "80 GiB"\n'
    'memory_bandwidth = "3.35 TB/s"\nusd_per_hour = 2.5\n'
)
PIPELINE = '[strategy]\nkind = "pipeline"\nclouds = ["east"]\nlayers = [12]\nwindows = [1]\n'


def read(*parts: str) -> Job:
    return parse_job("".join(parts), file=Path("x.toml"))


def test_units_become_numbers() -> None:
    job = read(BASE, LIMITS, ACCELERATOR)
    assert job.limits.deadline_s == 3 * 86400
    assert job.accelerator[0].memory_bandwidth_bytes_per_s == 3.35e12
    assert job.accelerator[0].flops_float32 is None


def test_they_survive_being_written() -> None:
    job = read(BASE, LIMITS, ACCELERATOR, PIPELINE)
    assert parse_job(dump_job(job), file=Path("again.toml")) == job
    assert isinstance(job.strategy, PipelineStrategy)
    assert job.strategy.layers == (12,)


def test_clouds_need_not_agree_on_them() -> None:
    assert read(BASE, LIMITS, ACCELERATOR).digest == read(BASE.replace("east.json", "other.json")).digest
    assert read(BASE, PIPELINE).digest != read(BASE).digest


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ((BASE, "[limits]\nbudget_usd = -5\n"), "must be more than 0, not -5"),
        ((BASE, "[limits]\nmemory_share = 1.5\n"), "must be at most 1"),
        ((BASE, '[limits]\ndeadline = "0 s"\n'), "must be at least 1 s"),
        ((BASE, '[limits]\ncodec_loss = "much"\n'), "must be 'none', 'slight' or 'some'"),
        ((BASE, ACCELERATOR.replace("3.35 TB/s", "3.35 TB")), "unknown unit"),
        ((BASE, ACCELERATOR.replace('"989 TFLOPS"', '"-1 TFLOPS"')), "TFLOPS"),
        ((BASE, PIPELINE.replace("[12]", "[]")), "must not be empty"),
        ((BASE, PIPELINE.replace("[12]", "[0]")), "must be at least 1, not 0"),
        ((BASE, PIPELINE.replace("[12]", '["a"]')), "must be a whole number"),
        ((BASE, PIPELINE.replace("[12]", "[6, 6]")), "1 clouds, 2 layers"),
        ((BASE, PIPELINE.replace('["east"]', '["east", "east"]')), "each name once"),
    ],
)
def test_absurd_numbers_are_refused(parts: tuple[str, ...], what: str) -> None:
    with pytest.raises(JobError) as caught:
        read(*parts)
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.cure


def test_only_the_named_clouds_are_used() -> None:
    west = '[[cloud]]\nname = "west"\nlisten = "h:1"\n[[link]]\nbetween = ["east", "west"]\n'
    job = read(BASE, west, PIPELINE)
    assert [cloud.name for cloud in job.used().cloud] == ["east"]
    assert job.used().link == ()
    assert read(BASE, west).used().link != ()


LINKED = '[[cloud]]\nname = "west"\nlisten = "h:1"\n[[link]]\nbetween = ["east", "west"]\n'


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("link.0.bandwidth=1 bps", "must be at least 1 kbps, not '1 bps'"),
        ("link.0.bandwidth=1e30 Gbps", "must be at most 100000 Gbps, not '1e30 Gbps'"),
        ("link.0.bandwidth=['1 Gbps', '1 bps']", "must be at least 1 kbps, not '1 bps'"),
        ("link.0.connection_bandwidth=1 bps", "must be at least 1 kbps"),
        ("link.0.rtt=1000 d", "must be at most 60 s, not '1000 d'"),
        ("link.0.jitter=2 min", "must be at most 60 s"),
        ("link.0.handling=2 min", "must be at most 60 s"),
        ("link.0.usd_per_gib=1e308", "must be at most 1000000, not 1e+308"),
        ("cloud.east.usd_per_hour=1e300", "must be at most 1000000, not 1e+300"),
        ("cloud.east.flops=1 FLOPS", "must be at least 1 GFLOPS, not '1 FLOPS'"),
        ("cloud.east.flops=1e40 FLOPS", "must be at most 1 EFLOPS, not '1e40 FLOPS'"),
        ("cloud.east.memory=2000 TiB", "must be at most 1024 TiB, not '2000 TiB'"),
        ("accelerator.mine.usd_per_hour=1e7", "must be at most 1000000"),
        ("accelerator.mine.memory_bandwidth=1 B/s", "must be at least 1 MB/s"),
        ("accelerator.mine.memory_bandwidth=2000 TB/s", "must be at most 1000 TB/s"),
    ],
)
def test_no_figure_is_beyond_all_that_is_built(change: str, what: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_job(f"{BASE}{LINKED}{ACCELERATOR}", file=Path("x.toml"), overrides=[change])
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.cure


def row_of_clouds(number: int) -> str:
    """A job of so many clouds, each linked to the next."""
    clouds = (f'[[cloud]]\nname = "c{one}"\nlisten = "h{one}:1"\n' for one in range(number))
    links = (f'[[link]]\nbetween = ["c{one}", "c{one + 1}"]\n' for one in range(number - 1))
    return f'name = "x"\n{"".join(clouds)}{"".join(links)}'


def test_a_job_has_at_most_64_clouds() -> None:
    assert len(read(row_of_clouds(64)).cloud) == 64
    with pytest.raises(JobError) as caught:
        read(row_of_clouds(65))
    (problem,) = caught.value.problems
    assert str(problem.key) == "cloud"
    assert "at most 64" in problem.what
    assert problem.cure == "leave some out"


def test_two_accelerators_that_mean_the_same_are_refused() -> None:
    own = ACCELERATOR.replace('"mine"', '"h100"') + ACCELERATOR.replace('"mine"', '"H-100"')
    with pytest.raises(JobError) as caught:
        read(BASE, own)
    (problem,) = caught.value.problems
    assert problem.key == 'accelerator "H-100": name'
    assert problem.what == "means the same device as 'h100', case and punctuation aside"
    assert problem.cure
