import json

import pytest
from bench import Deadline, tell


def test_work_fits_before_a_deadline_or_not() -> None:
    deadline = Deadline.after(1000.0)
    assert deadline.leaves()
    assert deadline.leaves(900.0)
    assert not deadline.leaves(1001.0)
    assert not Deadline.after(0.0).leaves()


def test_without_a_deadline_everything_fits() -> None:
    assert Deadline.after(None).leaves(1e9)


def test_a_finished_case_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tell({"case": 1, "text": "a\nb"})
    assert json.loads(capsys.readouterr().out.removesuffix("\n")) == {"case": 1, "text": "a\nb"}
