"""Files that are no job files, texts that are no TOML, and strange values everywhere."""

import datetime
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from isthmus.errors import JobError, UserError
from isthmus.job import load_job
from isthmus.job.load import parse_job
from tests.job.test_spec import DESIGN

STRANGE_VALUES = [-1, "", [{}], 10**30, math.nan, datetime.date(2024, 1, 1)]


def refused(path: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        load_job(path)
    return caught.value


def test_what_is_no_file_of_text_is_named_with_a_cure(tmp_path: Path) -> None:
    latin, file = tmp_path / "latin.toml", tmp_path / "file"
    latin.write_bytes(b'name = "\xff"\n')
    file.touch()
    for path in (tmp_path / "job.toml", tmp_path, latin, file / "job.toml"):
        error = refused(path)
        assert str(path) in error.message
        assert error.hint


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("name", "line 1, column 5"),
        ('name = "x"\n[[cloud]\n', "line 2, column 8"),
        ('name = "x', "line 1, column 10"),
        ("[train]\n[train]\n", "line 2, column 7"),
        ("name = [\n", "end of document"),
    ],
)
def test_syntax_errors_say_where(text: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    error = refused(file)
    assert isinstance(error, JobError)
    (problem,) = error.problems
    # How Python words the end of a text differs between its versions.
    assert problem.key in (place, "end of document")
    assert problem.what.startswith("not TOML: ")
    assert problem.cure


def places(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield (*place, key)
        yield from places(inner, (*place, key))


@pytest.mark.parametrize("strange", STRANGE_VALUES, ids=repr)
def test_a_strange_value_at_any_place_is_fine_or_gets_a_cure(strange: object) -> None:
    num_good = 0
    for *parents, key in places(tomllib.loads(DESIGN)):
        tables: Any = tomllib.loads(DESIGN)
        target = tables
        for step in parents:
            target = target[step]
        target[key] = strange
        try:
            parse_job(tomlkit.dumps(tables), file=Path("job.toml"))
        except JobError as error:
            num_good += all(problem.key and problem.what and problem.cure for problem in error.problems)
        else:
            num_good += 1
    assert num_good == len(list(places(tomllib.loads(DESIGN))))
