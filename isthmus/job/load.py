"""From a TOML file to a checked job, with all that is wrong at once, and back to TOML."""

import copy
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import tomlkit
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from isthmus.errors import FieldError, JobError, Problem, UserError
from isthmus.job.fields import FROM_FILE, Frozen, show_value
from isthmus.job.spec import CONFLICT, Finding, Job, Place, Tables, describe_place, find_conflicts, link_pair
from isthmus.units import closest, format_bandwidth, format_duration, suggest

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """An override that was applied: its text, and the place that exists or has its value because of it."""

    text: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Overridden:
    """The job's tables after the overrides, and the overrides that found no place."""

    tables: dict[str, object]
    applied: tuple[Override, ...]
    problems: tuple[Problem, ...]

    def blame(self, finding: Finding) -> Finding:
        """Return the finding with a word about the override that caused it, if one did."""
        causes = [one for one in self.applied if finding.place[: len(one.place)] == one.place]
        if not causes:
            return finding
        cause = max(reversed(causes), key=lambda one: len(one.place))
        return Finding(
            place=finding.place, what=f"{finding.what} (from --set {cause.text})", cure=finding.cure
        )


def apply_overrides(tables: Tables, overrides: Sequence[str]) -> Overridden:
    """Return a copy of the tables with every override that names a place put in."""
    changed = copy.deepcopy(dict(tables))
    applied: list[Override] = []
    problems: list[Problem] = []
    for text in overrides:
        try:
            applied.append(Override(text=text, place=_apply(changed, text)))
        except FieldError as error:
            problems.append(Problem(key=f"--set {text}", what=error.what, cure=error.cure))
    return Overridden(tables=changed, applied=tuple(applied), problems=tuple(problems))


def _apply(tables: dict[str, Any], text: str) -> Place:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise FieldError("is not of the form key=value", cure="write for example train.steps=10")
    return _put(tables, _locate(tables, keys), _parse_value(value))


def _locate(tables: Tables, keys: list[str]) -> Place:
    """Return the place of dotted keys, with entries of lists by their number."""
    target: Any = tables
    place: Place = ()
    for key in keys:
        match target:
            case dict():
                place, target = (*place, key), target.get(key, {})
            case list():
                index = _index(target, key, place)
                place, target = (*place, index), target[index]
            case _:
                raise FieldError(f"{describe_place(place, tables)} is not a table", cure="set it as a whole")
    return place


def _put(tables: dict[str, Any], place: Place, value: object) -> Place:
    """Set the value, and return the outermost place that had to be made for it."""
    target: Any = tables
    made = place
    for depth, step in enumerate(place[:-1], start=1):
        if isinstance(target, dict) and step not in target:
            target[step] = {}
            made = min(made, place[:depth], key=len)
        target = target[step]
    target[place[-1]] = value
    return made


def _index(items: list[object], key: str, place: Place) -> int:
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    names = [_names(place, item) for item in items]
    found = [index for index, its_names in enumerate(names) if key in its_names]
    if len(found) == 1:
        return found[0]
    where = ".".join(map(str, place))
    if found:
        raise FieldError(f"{key!r} names several entries of {where}", cure="use a number, counted from 0")
    raise FieldError(f"{where} has no entry {key!r}", cure=suggest(key, _choices(names)))


def _names(place: Place, item: object) -> tuple[str, ...]:
    """Return what an entry of a list may be called besides its number."""
    if not isinstance(item, dict):
        return ()
    if place == ("link",):
        pair = link_pair(item)
        return ("-".join(pair), "-".join(reversed(pair))) if pair else ()
    return (str(item["name"]),) if "name" in item else ()


def _choices(names: list[tuple[str, ...]]) -> list[str]:
    return [its_names[0] if its_names else str(index) for index, its_names in enumerate(names)]


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A text with line breaks could bring further keys.
    return parsed["value"] if parsed.keys() == {"value"} else text


_WHAT: Final = {
    "dict_type": "must be a table, not {value}",
    "extra_forbidden": "is not a known key",
    "finite_number": "must be a finite number, not {value}",
    "float_type": "must be a number, not {value}",
    "greater_than": "must be more than {gt:g}, not {value}",
    "greater_than_equal": "must be at least {ge:g}, not {value}",
    "int_type": "must be a whole number, not {value}",
    "less_than_equal": "must be at most {le}, not {value}",
    "literal_error": "must be {expected}, not {value}",
    "missing": "is missing",
    "model_type": "must be a table, not {value}",
    "string_too_short": "must not be empty",
    "string_type": "must be text, not {value}",
    "too_long": "has {actual_length} entries, and {max_length} are the most",
    "tuple_type": "must be a list of tables, not {value}",
    "union_tag_invalid": "must be one of {expected_tags}, not '{tag}'",
    "union_tag_not_found": "is missing",
}
_QUOTED: Final = re.compile("'([^']+)'")


def explain(error: ValidationError) -> tuple[Finding, ...]:
    """Return one finding for each thing that is wrong, but for what `find_conflicts` says by itself."""
    details = error.errors(include_url=False)
    return tuple(_finding(detail) for detail in details if detail["type"] != CONFLICT)


def _finding(detail: ErrorDetails) -> Finding:
    place = detail["loc"]
    if detail["type"].startswith("union_tag"):
        place = (*place, "kind")
    return Finding(place=_without_tag(place), what=_what(detail), cure=_cure(detail, place))


def _what(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    if "error" in context:
        return str(context["error"])
    sentence = _WHAT.get(detail["type"])
    if sentence is None:
        return detail["msg"]
    return sentence.format(
        value=show_value(detail["input"]), **{key: _whole(one) for key, one in context.items()}
    )


def _whole(limit: object) -> object:
    """1000000 rather than 1000000.0."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _cure(detail: ErrorDetails, place: Place) -> str:
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, FieldError) and error.cure:
        return error.cure
    if detail["type"] == "too_long":
        return "leave some out"
    if detail["type"] == "union_tag_not_found":
        return _kind_cure(detail["input"])
    meant = _meant(detail)
    if meant is not None:
        return f"did you mean {meant!r}?"
    *parents, key = (step for step in place if isinstance(step, str))
    fields = _fields_of(_models_at(parents))
    return _example(key, fields[key]) if key in fields else suggest(key, fields)


def _kind_cure(given: object) -> str:
    """The first kind of strategy that takes all the keys given, so that the cure is not refused in turn."""
    keys = set(given) if isinstance(given, dict) else set()
    models = _models_at(["strategy"])
    fitting = [_tag_of(model) for model in models if keys <= _fields_of([model]).keys()]
    near = max(models, key=lambda model: len(keys & _fields_of([model]).keys()))
    return f'for example kind = "{fitting[0] if fitting else _tag_of(near)}"'


def _meant(detail: ErrorDetails) -> str | None:
    context = detail.get("ctx", {})
    known = _QUOTED.findall(context.get("expected", context.get("expected_tags", "")))
    return closest(str(context.get("tag", detail["input"])), known)


def _example(key: str, field: FieldInfo) -> str:
    example = (field.examples or [None])[0]
    match example:
        case dict():
            return f"write a [{key}] table"
        case [dict()]:
            return f"write a [[{key}]] table for each"
    return f"for example {key} = {json.dumps(example, ensure_ascii=False)}"


def _models_at(keys: Sequence[str]) -> list[type[Frozen]]:
    models: list[type[Frozen]] = [Job]
    for key in keys:
        field = _fields_of(models).get(key)
        tagged = [model for model in models if _tag_of(model) == key]
        models = list(_models_in(field.annotation)) if field else tagged
    return models


def _models_in(annotation: object) -> Iterator[type[Frozen]]:
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _fields_of(models: list[type[Frozen]]) -> dict[str, FieldInfo]:
    by_model = (model.model_fields.items() for model in reversed(models))
    return {field.alias or name: field for items in by_model for name, field in items}


def _tag_of(model: type[Frozen]) -> object:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation)[0] if kind else None


def _without_tag(place: Place) -> Place:
    # Inside a union by `kind`, pydantic puts the kind into the place; the user did not write it there.
    match place:
        case ("strategy", tag, *deeper) if tag != "kind":
            return ("strategy", *deeper)
    return place


_NEW_FILE_MODE: Final = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What was measured on a link, with None for what was not.

    `bandwidth_bps` is from the first cloud to the second, then from the second to the first.
    """

    bandwidth_bps: tuple[float, float] | None = None
    rtt_s: float | None = None
    jitter_s: float | None = None
    handling_s: float | None = None
    connection_bps: float | None = None


def dump_job(job: Job) -> str:
    """Return TOML that loads back to an equal job, with every default written out."""
    return tomlkit.dumps(job.tables())


def update_job_file(path: Path, changes: Mapping[tuple[str, str], LinkFigures]) -> None:
    """Put figures measured on links, each named by its `between`, into a job file and keep its layout."""
    text = read_job_text(path)
    known = [link.between for link in parse_job(text, file=path).link]
    document: Any = tomlkit.parse(text)
    for pair, figures in changes.items():
        if pair not in known:
            raise UserError(f"{path} has no link between {' and '.join(pair)}")
        for key, value in _texts(figures):
            document["link"][known.index(pair)][key] = value
    updated = tomlkit.dumps(document)
    parse_job(updated, file=path)
    replace_file(path, updated)


def update_job_sections(
    path: Path,
    sections: Mapping[str, Mapping[str, object]],
    *,
    clouds: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """Put keys into sections and clouds of a job file, such as a plan's choice, and keep its layout."""
    text = read_job_text(path)
    names = [cloud.name for cloud in parse_job(text, file=path).cloud]
    document: Any = tomlkit.parse(text)
    for name, values in (clouds or {}).items():
        document["cloud"][names.index(name)].update(values)
    for section, values in sections.items():
        if section not in document:
            document[section] = tomlkit.table()
        for key, value in values.items():
            document[section][key] = value
    updated = tomlkit.dumps(document)
    parse_job(updated, file=path)
    replace_file(path, updated)


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash at any moment, meets the old text or the new one whole."""
    target = path.resolve()
    try:
        _replace(target, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _texts(figures: LinkFigures) -> Iterator[tuple[str, str | list[str]]]:
    if figures.bandwidth_bps is not None:
        there, back = map(format_bandwidth, figures.bandwidth_bps)
        yield "bandwidth", there if there == back else [there, back]
    if figures.rtt_s is not None:
        yield "rtt", format_duration(figures.rtt_s)
    if figures.jitter_s is not None:
        yield "jitter", format_duration(figures.jitter_s)
    if figures.handling_s is not None:
        yield "handling", format_duration(figures.handling_s)
    if figures.connection_bps is not None:
        yield "connection_bandwidth", format_bandwidth(figures.connection_bps)


def _replace(target: Path, text: str) -> None:
    mode = target.stat().st_mode & 0o777 if target.exists() else _NEW_FILE_MODE
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as beside:
            beside.write(text.encode())
            beside.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        Path(name).replace(target)
    except OSError:
        Path(name).unlink()
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Make what a file holds, or a rename in a folder, last through a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
