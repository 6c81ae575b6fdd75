"""Reads a job from TOML, reports all its mistakes at once with their cures, and writes it back."""

import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import tomlkit
from pydantic import ValidationError

from isthmus.errors import FieldError, JobError, Problem, UserError
from isthmus.job.fields import Frozen
from isthmus.job.mistakes import Finding, Place, Tables, describe_place, entry_name, find_mistakes, link_pair
from isthmus.job.spec import Job, find_conflicts
from isthmus.units import suggest

M = TypeVar("M", bound=Frozen)
_SYNTAX_ERROR: Final = re.compile(r"(?P<what>.*) \(at (?P<place>.*)\)", re.DOTALL)


def load_job(path: Path, *, overrides: Sequence[str] = ()) -> Job:
    """Return the job of a file, with `key=value` overrides applied."""
    return parse_job(read_text(path), file=path, overrides=overrides)


def parse_job(text: str, *, file: Path, overrides: Sequence[str] = ()) -> Job:
    """Return the job of a TOML text; errors name `file`."""
    tables = parse_toml(text, file)
    applied: dict[Place, str] = {}
    problems: list[Problem] = []
    for override in overrides:
        path, equals, value = override.partition("=")
        try:
            if not equals:
                raise FieldError("is not of the form key=value", cure="write for example train.steps=10")
            applied[_put(tables, path.strip(), _parse_value(value))] = override
        except FieldError as error:
            problems.append(Problem(key=f"--set {override}", what=error.what, cure=error.cure))
    job, findings = check(Job, tables, conflicts=find_conflicts)
    problems += [_blame(finding, applied).as_problem(tables) for finding in findings]
    if job is None or problems:
        raise JobError(file, tuple(problems))
    return job


def check(
    model: type[M], tables: Tables, *, conflicts: Callable[[Tables], Sequence[Finding]] = lambda _: ()
) -> tuple[M | None, list[Finding]]:
    """Return the model that TOML tables describe, or all that is wrong with them."""
    try:
        return model.from_tables(tables), []
    except ValidationError as error:
        return None, [*find_mistakes(error, model.toml_schema()), *conflicts(tables)]


def read_text(path: Path, *, what: str = "a job file") -> str:
    """Return the text of a file, or say in one sentence why there is none."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start})", hint="save it in the UTF-8 encoding"
        ) from None
    except OSError as error:
        why = {
            FileNotFoundError: f"there is no file {path}",
            IsADirectoryError: f"{path} is a folder",
        }
        message = why.get(type(error), f"{path} cannot be read: {error.strerror}")
        raise UserError(message, hint=f"give the path of {what}") from None


def parse_toml(text: str, file: Path) -> dict[str, Any]:
    """Return the tables of a TOML text, or say where it is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _SYNTAX_ERROR.fullmatch(str(error))
        what, place = (found["what"], found["place"]) if found else (str(error), "the file")
        cure = "put text in quotes, name a key or table only once, close every bracket"
        raise JobError(file, (Problem(key=place, what=f"not TOML: {what}", cure=cure),)) from None


def _blame(finding: Finding, applied: Mapping[Place, str]) -> Finding:
    """Return the finding with the override that caused it, if one did: the one nearest to its place."""
    causes = [place for place in applied if finding.place[: len(place)] == place]
    if not causes:
        return finding
    return replace(finding, what=f"{finding.what} (from --set {applied[max(causes, key=len)]})")


def _put(tables: Any, path: str, value: object) -> Place:
    """Set the value of dotted keys, and return the outermost place that had to be made for it."""
    keys = path.split(".")
    if not all(keys):
        raise FieldError("is not of the form key=value", cure="write for example train.steps=10")
    place: Place = ()
    made: Place = ()
    target: Any = tables
    for key in keys:
        if not isinstance(target, dict | list):
            raise FieldError(f"{describe_place(place, tables)} is not a table", cure="set it as a whole")
        where = ".".join(map(str, place))
        step: Any = key if isinstance(target, dict) else _index(target, key, where)
        place = (*place, step)
        if len(place) == len(keys):
            target[step] = value
        elif isinstance(target, dict) and step not in target:
            target[step] = {}
            made = made or place
        target = target[step]
    return made or place


def _index(items: list[Any], key: str, where: str) -> int:
    """Return the number of the entry of a list that goes by a number, a name, or a link by its clouds."""
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    names = [entry_name(where, item) if isinstance(item, dict) else None for item in items]
    pairs = [link_pair(item) if where == "link" and isinstance(item, dict) else None for item in items]
    turned = ["-".join(reversed(pair)) if pair else None for pair in pairs]
    found = [index for index in range(len(items)) if key in (names[index], turned[index])]
    if len(found) == 1:
        return found[0]
    if found:
        raise FieldError(f"{key!r} names several entries of {where}", cure="use a number, counted from 0")
    choices = [name or str(index) for index, name in enumerate(names)]
    raise FieldError(f"{where} has no entry {key!r}", cure=suggest(key, choices))


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A text with line breaks could bring further keys.
    return parsed["value"] if parsed.keys() == {"value"} else text


def dump_job(job: Job) -> str:
    """Return TOML that loads back to an equal job, with every default written out."""
    return tomlkit.dumps(job.tables())


def update_job_file(path: Path, changes: Mapping[str, Mapping[str, object]]) -> None:
    """Put values into tables of a job file, such as "link.0" or "strategy", and keep its layout."""
    document: Any = tomlkit.parse(read_text(path))
    for table, values in changes.items():
        for key, value in values.items():
            _put(document, f"{table}.{key}", value)
    updated = tomlkit.dumps(document)
    parse_job(updated, file=path)
    replace_file(path, updated)


def replace_file(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write a file so that a reader, or a crash at any moment, meets the old text or the new one whole.

    It is never open to more than its mode allows: that of the old file, or 0644, unless given.
    """
    target = path.resolve()
    try:
        mode = mode or (target.stat().st_mode & 0o777 if target.exists() else 0o644)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as beside:
                os.fchmod(descriptor, mode)
                beside.write(text.encode())
                beside.flush()
                os.fsync(descriptor)
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
        sync(target.parent)
    except OSError as error:
        hint = "choose a folder that this user may write to"
        raise UserError(f"{path} cannot be written: {error.strerror}", hint=hint) from None


def sync(path: Path) -> None:
    """Make what a file holds, or a rename in a folder, last through a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
