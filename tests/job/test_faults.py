"""Faults of clouds and ranks; those of links are tested with the emulator."""

from pathlib import Path
from typing import Literal

import pytest

from isthmus.errors import JobError
from isthmus.job.faults import CloudFault, CloudFaultKind, Fault, FaultKind, load_faults

SCRIPT = """
[[fault]]
at = "2 min"
kind = "gone"
cloud = "west"

[[fault]]
at = "30 s"
kind = "slow"
cloud = "east"
duration = "10 s"
factor = 3

[[fault]]
at = "1 s"
kind = "cut"
between = ["west", "east"]
duration = "5 s"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "faults.toml"
    path.write_text(text)
    return path


def load(
    path: Path, verb: Literal["probe", "run", "simulate"] = "simulate"
) -> tuple[Fault | CloudFault, ...]:
    return load_faults(path, links=[("east", "west")], clouds={"east": 1, "west": 2}, verb=verb)


def test_faults_of_clouds_and_links_come_by_time(tmp_path: Path) -> None:
    assert load(write(tmp_path, SCRIPT)) == (
        Fault(at_s=1.0, kind=FaultKind.CUT, between=("west", "east"), duration_s=5.0),
        CloudFault(at_s=30.0, kind=CloudFaultKind.SLOW, cloud="east", duration_s=10.0, factor=3.0),
        CloudFault(at_s=120.0, kind=CloudFaultKind.GONE, cloud="west"),
    )


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ('kind = "gone"\ncloud = "north"', "fault[0]: cloud", "the job has no cloud 'north'"),
        ('kind = "gone"', "fault[0]: cloud", "is missing"),
        ('kind = "gone"\ncloud = "east"\nduration = "1 s"', "fault[0]: duration", "is not a known key"),
        ('kind = "slow"\ncloud = "east"\nduration = "1 s"', "fault[0]: factor", "is missing"),
        ('kind = "kill"\ncloud = "west"\nrank = 2', "fault[0]: rank", "cloud 'west' has no rank 2"),
        ('kind = "kill"\ncloud = "west"\nuntil = "1 s"', "fault[0]: until", "must be later than `at`"),
        ('kind = "freeze"\ncloud = "west"', "fault[0]: duration", "is missing"),
        (
            'kind = "fill-disk"\ncloud = "west"\nduration = "1 s"\nrank=0',
            "fault[0]: rank",
            "is not a known key",
        ),
        ('kind = "away"\ncloud = "east"', "fault[0]: kind", "must be one of"),
    ],
)
def test_a_wrong_fault_of_a_cloud_is_named_with_its_cure(
    tmp_path: Path, text: str, key: str, what: str
) -> None:
    with pytest.raises(JobError) as raised:
        load(write(tmp_path, f'[[fault]]\nat = "1 s"\n{text}\n'))
    (problem,) = raised.value.problems
    assert problem.key == key
    assert what in problem.what
    assert problem.cure


def test_the_emulator_says_that_it_cannot_lose_a_cloud(tmp_path: Path) -> None:
    with pytest.raises(JobError) as raised:
        load(write(tmp_path, SCRIPT), "probe")
    assert [problem.key for problem in raised.value.problems] == ["fault[0]: kind", "fault[1]: kind"]
    assert all("isthmus simulate" in problem.what for problem in raised.value.problems)


RANDOM = """
seed = {seed}
[[fault]]
kind = "kill"
cloud = "west"
rank = 1
at = "1 s"
until = "9 s"
times = 5

[[fault]]
kind = "freeze"
cloud = "east"
at = "4 s"
duration = "2 s"
"""


def test_random_times_are_those_of_the_seed_and_of_no_other(tmp_path: Path) -> None:
    first, again, other = (load(write(tmp_path, RANDOM.format(seed=seed))) for seed in (1, 1, 2))
    assert first == again
    kills = [one.at_s for one in first if isinstance(one, CloudFault) and one.kind is CloudFaultKind.KILL]
    assert len(set(kills)) == 5
    assert kills == sorted(kills)
    assert all(1.0 <= at_s < 9.0 for at_s in kills)
    assert kills != [one.at_s for one in other if one.kind is CloudFaultKind.KILL]
    assert CloudFault(at_s=4.0, kind=CloudFaultKind.FREEZE, cloud="east", duration_s=2.0) in first


def test_a_run_names_what_only_the_simulator_can_play(tmp_path: Path) -> None:
    with pytest.raises(JobError) as raised:
        load(write(tmp_path, SCRIPT), "run")
    assert [(problem.key, problem.cure) for problem in raised.value.problems] == [
        ("fault[0]: kind", 'use kind = "kill"'),
        ("fault[1]: kind", 'use kind = "freeze" with a duration'),
    ]
