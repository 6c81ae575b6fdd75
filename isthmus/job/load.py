"""From a TOML file to a checked job, with all that is wrong at once."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from isthmus.errors import JobError, Problem, UserError
from isthmus.job.conflicts import find_conflicts
from isthmus.job.explain import explain
from isthmus.job.fields import FROM_FILE
from isthmus.job.findings import Tables
from isthmus.job.overrides import apply_overrides
from isthmus.job.spec import Job

_SYNTAX_ERROR: Final = re.compile(r"(?P<what>.*) \(at (?P<place>.*)\)", re.DOTALL)


def load_job(path: Path, *, overrides: Sequence[str] = ()) -> Job:
    """Return the job of a file, with `key=value` overrides applied."""
    return parse_job(read_job_text(path), file=path, overrides=overrides)


def parse_job(text: str, *, file: Path, overrides: Sequence[str] = ()) -> Job:
    """Return the job of a TOML text; `file` is where errors say that it comes from."""
    changed = apply_overrides(_parse_toml(text, file), overrides)
    try:
        job = Job.model_validate(changed.tables, by_alias=True, by_name=False, context=FROM_FILE)
    except ValidationError as error:
        findings = [*explain(error), *find_conflicts(changed.tables)]
        problems = [changed.blame(finding).as_problem(changed.tables) for finding in findings]
        raise JobError(file, (*changed.problems, *problems)) from None
    if changed.problems:
        raise JobError(file, changed.problems)
    return job


def read_job_text(path: Path) -> str:
    """Return the text of a job file, or say in one sentence why there is none."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}", hint="give the path of a job file") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder", hint="give the path of a job file") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start})", hint="save it in the UTF-8 encoding"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _parse_toml(text: str, file: Path) -> Tables:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _SYNTAX_ERROR.fullmatch(str(error))
        what, place = (found["what"], found["place"]) if found else (str(error), "the file")
        cure = "put text in quotes, name a key or table only once, close every bracket"
        raise JobError(file, (Problem(key=place, what=f"not TOML: {what}", cure=cure),)) from None
