"""Limits and accelerators of a job: units, bounds, and what is no part of the agreement between clouds."""

from pathlib import Path

import pytest

from isthmus.errors import JobError
from isthmus.job import Job, PipelineStrategy, dump_job
from isthmus.job.load import parse_job

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
        ((BASE, ACCELERATOR.replace("3.35 TB/s", "3.35 TB")), "is not a speed of memory"),
        ((BASE, ACCELERATOR.replace('"989 TFLOPS"', '"-1 TFLOPS"')), "TFLOPS"),
        ((BASE, PIPELINE.replace("[12]", "[]")), "whole numbers of at least 1"),
        ((BASE, PIPELINE.replace("[12]", "[0]")), "whole numbers of at least 1"),
        ((BASE, PIPELINE.replace("[12]", '["a"]')), "must be a whole number"),
        ((BASE, PIPELINE.replace("[12]", "[6, 6]")), "1 clouds, 2 layers"),
        ((BASE, PIPELINE.replace('["east"]', '["east", "east"]')), "each of them once"),
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
