"""What is measured by itself: once, only where the devices are here, and what local clouds share."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.plan.costs import Precision
from isthmus.plan.job_facts import cloud_facts
from isthmus.plan.planner import plan
from isthmus.plan.times import PassTimes, Profile, Sample, read_profile
from isthmus.train.profiles import Profiler, as_local, digest_of, is_open, why_not_here
from tests.train.test_setup import FIGURES, clouds, links, tiny_job

LAYER = PassTimes(forward_s=0.01, backward_s=0.02)


def made_up(job: Job, **changes: Any) -> dict[str, Profile]:
    one = Sample(
        num_sequences=1,
        sequence_length=32,
        precision=Precision.FLOAT32,
        embedding=LAYER,
        layers=(LAYER, LAYER),
        head=LAYER,
    )
    found = Profile(device="cpu", model_type="llama", samples=(one,), **changes)
    return {cloud.name: found for cloud in job.cloud}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were measured together."""
    made: list[Job] = []

    def measure(job: Job, **_: Any) -> dict[str, Profile]:
        made.append(job)
        return made_up(job)

    monkeypatch.setattr("isthmus.train.profiles.measure_together", measure)
    return made


def test_a_second_start_measures_nothing_and_plans_the_same(tmp_path: Path, calls: Sequence[Job]) -> None:
    notes: list[str] = []
    profiler = Profiler(cache=tmp_path, note=notes.append)
    job = tiny_job(*FIGURES)
    first, second = profiler.all_here(job), profiler.all_here(job)
    assert len(calls) == 1
    assert "at the same time" in notes[0]
    assert "were measured here on" in notes[1]
    assert [one.profile for one in first.cloud] == [one.profile for one in second.cloud]
    assert read_profile(Path(str(first.cloud[0].profile))) == made_up(job)["east"]
    assert all(stage.is_measured for stage in plan(first).stages)


def test_another_model_or_precision_is_measured_anew(tmp_path: Path, calls: Sequence[Job]) -> None:
    profiler = Profiler(cache=tmp_path, note=lambda _: None)
    for changes in ((), ("model.config.hidden_size=64",), ("train.precision=bfloat16",)):
        profiler.all_here(tiny_job(*FIGURES, *changes))
    assert len(calls) == 3


def test_a_profile_that_the_job_names_is_kept(tmp_path: Path, calls: Sequence[Job]) -> None:
    job = tiny_job(*FIGURES, "cloud.east.profile=mine.json", "cloud.west.profile=mine.json")
    known = Profiler(cache=tmp_path, note=lambda _: None).all_here(job)
    assert not calls
    assert known.cloud[0].profile == "mine.json"


def test_without_profiling_the_catalogue_is_named(tmp_path: Path, calls: Sequence[Job]) -> None:
    notes: list[str] = []
    known = Profiler(cache=tmp_path, note=notes.append, is_wanted=False).all_here(tiny_job(*FIGURES))
    assert not calls
    assert notes == ["times are those of the catalogue, since --no-profile was given"]
    assert {one.profile for one in known.cloud} == {None}


def test_figures_that_scatter_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr("isthmus.train.profiles.measure_together", lambda job, **_: made_up(job, scatter=0.4))
    Profiler(cache=tmp_path, note=notes.append).all_here(tiny_job(*FIGURES))
    assert "scatter by 40%" in notes[1]


@pytest.mark.usefixtures("calls")
def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("in the way")
    with pytest.raises(UserError, match="cannot be kept") as caught:
        Profiler(cache=tmp_path, note=lambda _: None).all_here(tiny_job(*FIGURES))
    assert caught.value.hint is not None
    assert "--no-profile" in caught.value.hint


def test_local_clouds_divide_the_memory_of_the_machine() -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    local = as_local(tiny_job(*FIGURES))
    assert [one.capacity_bytes for one in cloud_facts(local)] == [whole // 2, whole // 2]
    given = as_local(tiny_job(*FIGURES, "cloud.east.memory=1 GiB"))
    assert cloud_facts(given)[0].capacity_bytes == 2**30


def test_local_clouds_divide_the_cpu_of_the_catalogue() -> None:
    alone = cloud_facts(tiny_job(network=clouds("alone")))[0].accelerator
    east, west = (one.accelerator for one in cloud_facts(tiny_job(*FIGURES)))
    assert east.flops == west.flops == alone.flops / 2
    apart = cloud_facts(tiny_job(*FIGURES, "cloud.east.listen=east.example.com:7600"))
    assert apart[0].accelerator.flops == alone.flops


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("cloud.east.listen=east.example.com:7600", "not on this machine but at east.example.com:7600"),
        ("cloud.east.accelerator=h100", "has the accelerator h100"),
        ("cloud.east.device=npu", "has a device of kind npu"),
    ],
)
def test_clouds_elsewhere_are_planned_by_the_catalogue(change: str, reason: str) -> None:
    found = why_not_here(tiny_job(*FIGURES, change))
    assert found is not None
    assert reason in found
    assert why_not_here(tiny_job(*FIGURES)) is None


def test_a_job_that_leaves_nothing_open_is_not_worth_measuring() -> None:
    assert is_open(tiny_job(*FIGURES))
    fixed = ("strategy.layers=[1, 1]", "strategy.microbatches=4")
    assert not is_open(tiny_job(*FIGURES, *fixed))
    assert is_open(tiny_job(*FIGURES, *fixed, "link.0.codec=auto"))


def test_the_digest_knows_what_figures_depend_on() -> None:
    job = tiny_job(*FIGURES)
    one = digest_of(job, num_threads=1)
    assert one == digest_of(tiny_job("link.0.rtt=90 ms", FIGURES[1]), num_threads=1)
    assert one != digest_of(job, num_threads=2)
    assert one != digest_of(tiny_job(*FIGURES, "strategy.microbatches=2"), num_threads=1)
    assert one != digest_of(tiny_job(*FIGURES, "link.0.codec=rotate | int4"), num_threads=1)
    three = clouds("east", "west", "north") + links(("east", "west"), ("west", "north"))
    assert one != digest_of(tiny_job(network=three), num_threads=1)
