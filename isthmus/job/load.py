"""Reads a job from TOML, reports all its mistakes at once with their cures, and writes it back."""

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import tomlkit
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from isthmus.errors import FieldError, JobError, Problem, UserError
from isthmus.job.fields import Frozen, show_value
from isthmus.job.spec import CONFLICT, Finding, Job, Place, Tables, describe_place, find_conflicts, link_pair
from isthmus.units import closest, suggest

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
        try:
            applied[_apply(tables, override)] = override
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
        schema = model.toml_schema()
        wrong = [_finding(one, schema) for one in error.errors(include_url=False) if not _is_echo(one)]
        return None, [*wrong, *conflicts(tables)]


def _is_echo(detail: ErrorDetails) -> bool:
    """Whether another finding tells the same: a conflict, or a list short of its wrong entries."""
    return detail["type"] == CONFLICT or (detail["type"] == "too_short" and bool(detail["input"]))


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


def _apply(tables: dict[str, Any], text: str) -> Place:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise FieldError("is not of the form key=value", cure="write for example train.steps=10")
    return _put(tables, keys, _parse_value(value))


def _put(tables: Any, keys: Sequence[str], value: object) -> Place:
    """Set the value of dotted keys, and return the outermost place that had to be made for it."""
    place: Place = ()
    made: Place = ()
    target = tables
    for key in keys[:-1]:
        step = _step(target, key, place, tables)
        place = (*place, step)
        if isinstance(target, dict) and step not in target:
            target[step] = {}
            made = made or place
        target = target[step]
    step = _step(target, keys[-1], place, tables)
    target[step] = value
    return made or (*place, step)


def _step(target: object, key: str, place: Place, tables: Tables) -> str | int:
    """Return the key of a table, or the number of the entry of a list that goes by this name."""
    match target:
        case dict():
            return key
        case list():
            return _index(target, key, place)
    raise FieldError(f"{describe_place(place, tables)} is not a table", cure="set it as a whole")


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
    choices = [its_names[0] if its_names else str(index) for index, its_names in enumerate(names)]
    raise FieldError(f"{where} has no entry {key!r}", cure=suggest(key, choices))


def _names(place: Place, item: object) -> tuple[str, ...]:
    """Return what an entry of a list may be called besides its number."""
    if not isinstance(item, dict):
        return ()
    if place == ("link",):
        pair = link_pair(item)
        return ("-".join(pair), "-".join(reversed(pair))) if pair else ()
    return (str(item["name"]),) if "name" in item else ()


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A text with line breaks could bring further keys.
    return parsed["value"] if parsed.keys() == {"value"} else text


_WHAT: Final = {
    "bool_type": "must be true or false, not {value}",
    "dict_type": "must be a table, not {value}",
    "extra_forbidden": "is not a known key",
    "finite_number": "must be a finite number, not {value}",
    "float_type": "must be a number, not {value}",
    "greater_than": "must be more than {gt:g}, not {value}",
    "greater_than_equal": "must be at least {ge:g}, not {value}",
    "int_type": "must be a whole number, not {value}",
    "less_than": "must be less than {lt:g}, not {value}",
    "less_than_equal": "must be at most {le}, not {value}",
    "literal_error": "must be {expected}, not {value}",
    "missing": "is missing",
    "model_attributes_type": "must be a table, not {value}",
    "model_type": "must be a table, not {value}",
    "string_too_short": "must not be empty",
    "string_type": "must be text, not {value}",
    "too_long": "has {actual_length} entries, and {max_length} are the most",
    "too_short": "must not be empty",
    "tuple_type": "must be a list, not {value}",
    "union_tag_invalid": "must be one of {expected_tags}, not '{tag}'",
    "union_tag_not_found": "is missing",
}
_QUOTED: Final = re.compile("'([^']+)'")
_TAG: Final = "kind"
Node = dict[str, Any]


def _finding(detail: ErrorDetails, schema: Node) -> Finding:
    place = detail["loc"]
    if detail["type"].startswith("union_tag"):
        place = (*place, _TAG)
    keys = [step for step in place if isinstance(step, str)]
    # Pydantic puts the tag of a union into the place; the user did not write it there.
    _, tags = _walk(keys, schema)
    *parents, key = keys
    tables, _ = _walk(parents, schema)
    return Finding(
        place=tuple(step for step in place if step not in tags),
        what=_what(detail),
        cure=_cure(detail, key, tables),
    )


def _what(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    if "error" in context:
        return str(context["error"])
    sentence = _WHAT.get(detail["type"])
    if sentence is None:
        return detail["msg"]
    words = {key: _as_in_toml(one) for key, one in context.items()}
    return sentence.format(value=show_value(detail["input"]), **words)


def _as_in_toml(word: object) -> object:
    """Return 1000000 for 1000000.0, and true for True."""
    match word:
        case float() if word.is_integer():
            return int(word)
        case str():
            return word.replace("True", "true").replace("False", "false")
    return word


def _cure(detail: ErrorDetails, key: str, tables: list[Node]) -> str:
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, FieldError) and error.cure:
        return error.cure
    if detail["type"] == "too_long":
        return "leave some out"
    if detail["type"] == "union_tag_not_found":
        return _tag_cure(detail["input"], tables)
    meant = _meant(detail)
    if meant is not None:
        return f"did you mean {meant!r}?"
    known = {name: node for table in reversed(tables) for name, node in table["properties"].items()}
    return _example(key, known[key]) if key in known else suggest(key, known)


def _tag_cure(given: object, tables: list[Node]) -> str:
    """Suggest the kind that takes all the keys given, or most of them, so that the cure is not refused."""
    keys = set(given) if isinstance(given, dict) else set()
    nearest = max(tables, key=lambda table: len(keys & table["properties"].keys()))
    return f'for example {_TAG} = "{_tags_of(nearest)[0]}"'


def _meant(detail: ErrorDetails) -> str | None:
    context = detail.get("ctx", {})
    known = _QUOTED.findall(context.get("expected", context.get("expected_tags", "")))
    return closest(str(context.get("tag", detail["input"])), known)


def _example(key: str, node: Node) -> str:
    example = node.get("examples", [node.get("default")])[0]
    match example:
        case dict():
            return f"write a [{key}] table"
        case [dict(), *_]:
            return f"write a [[{key}]] table for each"
    return f"for example {key} = {json.dumps(example, ensure_ascii=False)}"


def _walk(keys: Sequence[str], schema: Node) -> tuple[list[Node], list[str]]:
    """Return the tables of a JSON schema that keys lead to, and which of the keys are tags of unions."""
    tables, tags = [schema], []
    for key in keys:
        inner = [table["properties"][key] for table in tables if key in table["properties"]]
        tagged = [table for table in tables if key in _tags_of(table)]
        if tagged and not inner:
            tables = tagged
            tags.append(key)
        else:
            tables = [table for node in inner for table in _tables_in(node, schema)]
    return tables, tags


def _tables_in(node: Node, schema: Node) -> Iterator[Node]:
    if "$ref" in node:
        yield schema["$defs"][node["$ref"].rpartition("/")[2]]
    for part in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _tables_in(part, schema)
    if "items" in node:
        yield from _tables_in(node["items"], schema)


def _tags_of(table: Node) -> list[str]:
    tag = table["properties"].get(_TAG, {})
    return [*tag.get("enum", ()), *([tag["const"]] if "const" in tag else ())]


def dump_job(job: Job) -> str:
    """Return TOML that loads back to an equal job, with every default written out."""
    return tomlkit.dumps(job.tables())


def update_job_file(path: Path, changes: Mapping[str, Mapping[str, object]]) -> None:
    """Put values into tables of a job file, such as "link.0" or "strategy", and keep its layout."""
    document: Any = tomlkit.parse(read_text(path))
    for table, values in changes.items():
        for key, value in values.items():
            _put(document, [*table.split("."), key], value)
    updated = tomlkit.dumps(document)
    parse_job(updated, file=path)
    replace_file(path, updated)


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash at any moment, meets the old text or the new one whole."""
    target = path.resolve()
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    try:
        _replace(target, text, mode)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _replace(target: Path, text: str, mode: int) -> None:
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
