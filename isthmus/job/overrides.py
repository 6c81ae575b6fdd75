"""Changes from the command line: `train.steps=10`, `cloud.west.ranks=4`, `link.east-west.rtt=40 ms`."""

import copy
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.errors import Problem
from isthmus.job.findings import FieldError, Finding, Place, Tables, describe_place, link_pair, suggest


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
