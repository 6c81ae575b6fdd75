from pathlib import Path

import pytest

from isthmus.errors import JobError, UserError
from isthmus.job.faults import CloudFault, Fault, FaultKind, load_faults
from isthmus.wan.shaping import Direction, Disturbed

GOOD = """
[[fault]]
at = "30 s"
kind = "blackhole"
between = ["east", "west"]
duration = "500 ms"

[[fault]]
at = "1 s"
kind = "slow-down"
between = ["west", "east"]
duration = "1 min"
factor = 10

[[fault]]
at = "40 s"
kind = "corrupt"
between = ["east", "west"]
from = "west"
bytes = 3

[[fault]]
at = "2 s"
kind = "cut"
between = ["east", "west"]
duration = "5 s"
"""
CUT = 'kind = "cut"\nbetween = ["east", "west"]\nduration = "5 s"\n'


class Recorder(Disturbed):
    """A link that only notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def cut(self, duration_s: float) -> None:
        self.done.append(("cut", duration_s))

    def blackhole(self, duration_s: float) -> None:
        self.done.append(("blackhole", duration_s))

    def slow_down(self, factor: float, duration_s: float) -> None:
        self.done.append(("slow_down", factor, duration_s))

    def corrupt(self, direction: Direction, num_bytes: int = 1) -> None:
        self.done.append(("corrupt", direction, num_bytes))


def write(folder: Path, text: str) -> Path:
    path = folder / "faults.toml"
    path.write_text(text)
    return path


def load(path: Path) -> list[Fault]:
    found = load_faults(path, links=[("east", "west")], clouds={}, verb="probe")
    assert not any(isinstance(one, CloudFault) for one in found)
    return [one for one in found if isinstance(one, Fault)]


def test_faults_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    faults = load(write(tmp_path, GOOD))
    assert [(fault.at_s, fault.kind) for fault in faults] == [
        (1.0, FaultKind.SLOW_DOWN),
        (2.0, FaultKind.CUT),
        (30.0, FaultKind.BLACKHOLE),
        (40.0, FaultKind.CORRUPT),
    ]
    assert faults[0] == Fault(
        at_s=1.0, kind=FaultKind.SLOW_DOWN, between=("west", "east"), duration_s=60.0, factor=10.0
    )
    assert (faults[3].sender, faults[3].num_bytes) == ("west", 3)


def test_a_fault_does_to_the_link_what_it_says(tmp_path: Path) -> None:
    link = Recorder()
    for fault in load(write(tmp_path, GOOD)):
        link.disturb(fault, dialer="west")
    assert link.done == [
        ("slow_down", 10.0, 60.0),
        ("cut", 5.0),
        ("blackhole", 0.5),
        ("corrupt", Direction.UP, 3),
    ]


def test_corruption_comes_from_the_first_cloud_unless_told(tmp_path: Path) -> None:
    text = '[[fault]]\nat = "1 s"\nkind = "corrupt"\nbetween = ["east", "west"]\n'
    link = Recorder()
    link.disturb(load(write(tmp_path, text))[0], dialer="west")
    assert link.done == [("corrupt", Direction.DOWN, 1)]


@pytest.mark.parametrize(
    ("text", "key", "what", "cure"),
    [
        ("", "fault", "is missing", "write a [[fault]] table for each"),
        ("fault = 3", "fault", "must be a list", "write a [[fault]] table for each"),
        ("fault = [3]", "fault[0]", "must be a table", "write a [[fault]] table for each"),
        (f'[[fault]]\nat = "1 s"\n{CUT}\n[other]', "other", "is not a known key", "choose from seed, fault"),
        (f"[[fault]]\n{CUT}", "fault[0]: at", "is missing", 'for example at = "30 s"'),
        (f"[[fault]]\nat = 5\n{CUT}", "fault[0]: at", "has no unit", "for example at ="),
        (f'[[fault]]\nat = "5"\n{CUT}', "fault[0]: at", "has no unit", "for example at ="),
        (
            '[[fault]]\nat = "5 s"\nkind = "cutt"\nbetween = ["east", "west"]\nduration = "1 s"',
            "fault[0]: kind",
            "must be one of 'cut', 'blackhole', 'slow-down', 'corrupt', 'slow', 'gone', ",
            "did you mean 'cut'?",
        ),
        (
            f'[[fault]]\nat = "5 s"\ndurations = "1 s"\n{CUT}',
            "fault[0]: durations",
            "is not a known key",
            "did you mean 'duration'?",
        ),
        (
            f'[[fault]]\nat = "5 s"\nfactor = 2\n{CUT}',
            "fault[0]: factor",
            "is not a known key",
            "choose from at, until, times, between, kind, duration",
        ),
        (
            '[[fault]]\nat = "5 s"\nkind = "cut"\nbetween = ["east", "west"]\nduration = "0 s"',
            "fault[0]: duration",
            "must be at least 1 ms",
            'for example duration = "5 s"',
        ),
        (
            '[[fault]]\nat = "5 s"\nkind = "cut"\nbetween = ["east"]\nduration = "1 s"',
            "fault[0]: between[1]",
            "missing",
            "for example between",
        ),
        (
            '[[fault]]\nat = "5 s"\nkind = "cut"\nbetween = ["east", "north"]\nduration = "1 s"',
            "fault[0]: between",
            "the job has no link between 'east' and 'north'",
            "choose from east-west",
        ),
        (
            f'[[fault]]\nat = "5 s"\nfactor = 1\n{CUT.replace("cut", "slow-down")}',
            "fault[0]: factor",
            "must be more than 1, not 1",
            "for example factor = 10",
        ),
        (
            '[[fault]]\nat = "5 s"\nkind = "corrupt"\nbetween = ["east", "west"]\nbytes = true',
            "fault[0]: bytes",
            "must be a whole number, not true",
            "for example bytes = 1",
        ),
        (
            '[[fault]]\nat = "5 s"\nkind = "corrupt"\nbetween = ["east", "west"]\nfrom = "north"',
            "fault[0]: from",
            "must be one of the two clouds, not 'north'",
            "name one of east and west",
        ),
    ],
)
def test_a_wrong_fault_is_named_with_its_cure(
    tmp_path: Path, text: str, key: str, what: str, cure: str
) -> None:
    with pytest.raises(JobError) as raised:
        load(write(tmp_path, text))
    (problem,) = raised.value.problems
    assert problem.key == key
    assert what in problem.what
    assert problem.cure is not None
    assert cure in problem.cure


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(JobError) as raised:
        load(write(tmp_path, '[[fault]]\nat = 5\nkind = "cut"\n[[fault]]\nkind = "corrupt"\nat = "1 s"'))
    assert [problem.key for problem in raised.value.problems] == [
        "fault[0]: at",
        "fault[0]: between",
        "fault[0]: duration",
        "fault[1]: between",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "faults.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        load(path)
    assert raised.value.hint
