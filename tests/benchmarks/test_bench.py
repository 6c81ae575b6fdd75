import json
from pathlib import Path

import pytest
from bench import Choice, Deadline, options, show, tell


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


def test_options_are_given_by_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--tiny --steps 7 --no-mps --rows b a --seeds 3 4 --out x --score s.jsonl --limit-s 2"
    monkeypatch.setattr("sys.argv", ["script", *words.split()])
    given = options(
        None,
        tiny=False,
        quick=False,
        steps=3,
        repeats=1,
        mps=True,
        rows=Choice(["a"], ["a", "b"]),
        seeds=Choice([], range(10)),
        kind=Choice("one", ["one", "two"]),
        out=Path("runs"),
        score=[],
        limit_s=float,
        device=str,
    )
    assert (given.tiny, given.quick, given.mps) == (True, False, False)
    assert (given.steps, given.repeats, given.limit_s, given.device) == (7, 1, 2.0, None)
    assert (given.rows, given.seeds, given.kind) == (["b", "a"], [3, 4], "one")
    assert (given.out, given.score) == (Path("x"), [Path("s.jsonl")])


def test_a_value_that_is_no_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script", "--kind", "three"])
    with pytest.raises(SystemExit):
        options(None, kind=Choice("one", ["one", "two"]))


def test_a_table_has_the_keys_of_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    show([{"what": "plan", "seconds": "1.5"}, {"what": "simulate", "seconds": "0.2"}], title="speed")
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("speed", "what", "seconds", "plan", "0.2"))
    show([])
    assert capsys.readouterr().out == ""
