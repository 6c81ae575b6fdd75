"""Faults of clouds, which only the simulator plays; those of links are tested with the emulator."""

from pathlib import Path

import pytest

from isthmus.errors import JobError
from isthmus.job.faults import CloudFault, CloudFaultKind, Fault, FaultKind, load_faults, load_script

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


def load(path: Path) -> tuple[Fault | CloudFault, ...]:
    return load_script(path, links=[("east", "west")], clouds=["east", "west"])


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
        load_faults(write(tmp_path, SCRIPT))
    assert [problem.key for problem in raised.value.problems] == ["fault[0]: kind", "fault[1]: kind"]
    assert all("isthmus simulate" in problem.what for problem in raised.value.problems)
