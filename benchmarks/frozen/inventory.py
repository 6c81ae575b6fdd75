"""What users see of a tree, as texts: job keys, verbs and flags, events, files of a run, printed JSON."""

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from revisions import Tree, last_lines

_CLOUDS: Final = ("east", "west", "north")
_WIDE: Final = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
_TIMED_EVENTS: Final = frozenset({"span data"})
"""Kinds of events that are there only when a step has waited, so by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What users see, by what it is, and what could not be found out."""

    names: Mapping[str, frozenset[str]]
    errors: tuple[str, ...] = ()


class VerbFailed(Exception):
    """A verb that prints what the inventory needs has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an inventory has lost and gained; `excused` are losses that the changelog names."""

    missing: tuple[str, ...]
    added: tuple[str, ...]
    excused: tuple[str, ...]


def take_inventory(tree: Tree, job: Path, runs: Sequence[Path], *, printed: str) -> Inventory:
    """All that users see of a tree.

    `runs` are run directories that it has written, the first by that job; `printed` is what that run printed.
    """
    ways: dict[str, Callable[[], Iterable[str]]] = {
        "job keys": lambda: schema_keys(_json(tree, job, "schema")),
        "verbs and flags": lambda: _verbs(tree, job.parent),
        "events": lambda: (key for run in runs for key in event_keys(run)),
        "files of a run": lambda: (name for run in runs for name in file_names(run)),
        "run --json": lambda: json_keys(_read_json(printed, f"run {job.name} of {tree.name}")),
        "plan --json": lambda: json_keys(_json(tree, job, "plan", str(job), "--json")),
        "simulate --json": lambda: json_keys(_json(tree, job, "simulate", str(job), "--json")),
        "report --json": lambda: json_keys(_json(tree, job, "report", *map(str, runs[:1]), "--json")),
    }
    names, errors = {}, []
    for kind, find in ways.items():
        try:
            names[kind] = frozenset(find())
        except VerbFailed as failed:
            errors.append(str(failed))
    return Inventory(names=names, errors=tuple(errors))


def compare(old: Inventory, new: Inventory, *, told: str) -> dict[str, Change]:
    """The change of each kind that has changed; `told` is what the changelog says since."""
    changes = {}
    for kind in old.names.keys() & new.names.keys():
        before, after = old.names[kind], new.names[kind]
        lost = sorted(before - after)
        excused = tuple(name for name in lost if any(is_told(one, told) for one in _lost_whole(name, lost)))
        missing = tuple(name for name in lost if name not in excused)
        if lost or after - before:
            added = tuple(sorted(after - before))
            changes[kind] = Change(missing=missing, added=added, excused=excused)
    return changes


def is_told(name: str, changelog: str) -> bool:
    """Whether a changelog has a name in backticks: all of it, or its end behind a dot, a blank or a slash."""
    quoted = re.findall(r"`([^`]+)`", changelog)
    return any(name == text or re.search(rf"[ ./]{re.escape(text)}$", name) for text in quoted)


def _lost_whole(name: str, lost: Sequence[str]) -> list[str]:
    """A name, and those above it that are lost with all that is below them."""
    above = [name[: one.start()] for one in re.finditer(r"[.=\[]", name)]
    return [name, *(one for one in above if one in lost)]


def new_lines(old: str, new: str) -> str:
    """The lines of a text that an older one lacks."""
    before = set(old.splitlines())
    return "\n".join(line for line in new.splitlines() if line not in before)


def schema_keys(schema: Mapping[str, Any]) -> set[str]:
    """The keys of a JSON schema, as `train.steps`; of a choice its values too, as `train.decay=cosine`."""
    return set(_schema_keys(schema, schema.get("$defs", {}), "", ()))


def _schema_keys(
    part: Mapping[str, Any], defs: Mapping[str, Any], key: str, within: tuple[str, ...]
) -> Iterator[str]:
    name = part.get("$ref", "").rpartition("/")[2]
    if name and name not in within:
        yield from _schema_keys(defs[name], defs, key, (*within, name))
    values = part.get("enum", [part["const"]] if "const" in part else [])
    yield from (f"{key}={value}" for value in values)
    for child, inner in part.get("properties", {}).items():
        path = f"{key}.{child}" if key else child
        yield path
        yield from _schema_keys(inner, defs, path, within)
    if isinstance(part.get("items"), Mapping):
        yield from _schema_keys(part["items"], defs, f"{key}[]", within)
    for way in ("anyOf", "oneOf", "allOf"):
        for inner in part.get(way, ()):
            yield from _schema_keys(inner, defs, key, within)


def help_names(text: str) -> tuple[list[str], list[str]]:
    """The verbs and the flags and arguments that a page of help lists."""
    verbs, names, panel = [], [], ""
    for line in text.splitlines():
        if (title := re.match(r"╭─ (\w+) ", line)) is not None:
            panel = title[1]
        elif (row := re.match(r"│ (?:\*|\s) *(\S+)|│ (\S+)", line)) is not None:
            first = row[1] or row[2] or ""
            if panel == "Commands" and line[2] != " ":
                verbs.append(first)
            elif panel == "Options":
                names += re.findall(r"(?<!\S)--?[a-z][a-z-]*", line[:40])
            elif panel == "Arguments" and re.fullmatch(r"[A-Z_]+", first):
                names.append(first)
    return verbs, names


def event_keys(run: Path) -> set[str]:
    """Kinds of events in a run directory, each with the keys of its values."""
    found = set()
    for path in run.glob("events/*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            kind = f"{event.pop('event')} {event.pop('kind')}"
            if kind not in _TIMED_EVENTS:
                found |= {kind, *(f"{kind}.{key}" for key in json_keys(event))}
    return found


def file_names(run: Path) -> set[str]:
    """The files of a run directory, without numbers and clouds in their names."""
    found = set()
    for path in run.rglob("*"):
        if path.is_file():
            found.add(re.sub(r"\d+", "N", _no_clouds(str(path.relative_to(run)))))
    return found


def json_keys(value: Any, key: str = "") -> set[str]:
    """The keys of a JSON value, as `clouds[].name`; a cloud in a key is any cloud."""
    if isinstance(value, Mapping):
        found = set()
        for name, inner in value.items():
            path = f"{key}.{_no_clouds(name)}" if key else _no_clouds(name)
            found |= {path, *json_keys(inner, path)}
        return found
    if isinstance(value, list):
        return {name for inner in value for name in json_keys(inner, f"{key}[]")}
    return set()


def _no_clouds(text: str) -> str:
    return re.sub(rf"\b({'|'.join(_CLOUDS)})\b", "CLOUD", text)


def _verbs(tree: Tree, folder: Path, verb: tuple[str, ...] = ()) -> Iterator[str]:
    text = _output(tree, folder, *verb, "--help")
    verbs, names = help_names(text)
    yield from (" ".join((*verb, name)) for name in names)
    for inner in verbs:
        yield " ".join((*verb, inner))
        yield from _verbs(tree, folder, (*verb, inner))


def _json(tree: Tree, job: Path, *arguments: str) -> Any:
    output = _output(tree, job.parent, *arguments)
    return _read_json(output, f"{' '.join(arguments)} of {tree.name}")


def _read_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise VerbFailed(f"isthmus {what} prints no JSON: {error}") from error


def _output(tree: Tree, folder: Path, *arguments: str) -> str:
    found = subprocess.run(
        tree.isthmus(*arguments),
        cwd=folder,
        env=tree.environment(more=_WIDE),
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise VerbFailed(f"isthmus {' '.join(arguments)} of {tree.name}: {last_lines(found.stderr)}")
    return found.stdout
