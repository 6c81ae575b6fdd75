"""What is wrong with a file of TOML: findings, their places, and pydantic's errors in the words of TOML."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from isthmus.errors import FieldError, Problem
from isthmus.units import closest, suggest

Tables = Mapping[str, object]
Place = tuple[str | int, ...]
Node = dict[str, Any]
"""A part of a JSON schema."""

CONFLICT: Final = "conflict"
"""Type of the validation error that carries what `find_conflicts` found."""
_TAG: Final = "kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing wrong at one place of the tables."""

    place: Place
    what: str
    cure: str | None = None

    def as_problem(self, tables: Tables) -> Problem:
        """Return it with the place written as a user would."""
        return Problem(key=describe_place(self.place, tables), what=self.what, cure=self.cure)


def describe_place(place: Place, tables: Tables) -> str:
    """Return `cloud "west": ranks` for ("cloud", 1, "ranks"); `cloud[1]: ranks` where it has no name."""
    match place:
        case (str(section), int(index), *keys):
            found = entries(tables, section)
            name = entry_name(section, found[index]) if index < len(found) else None
            entry = f'{section} "{name}"' if name else f"{section}[{index}]"
            return f"{entry}: {_dotted(keys)}" if keys else entry
    return _dotted(place)


def entries(tables: Tables, section: str) -> list[Tables]:
    """Return the tables of `[[section]]`, with an empty one for each entry that is no table."""
    found = tables.get(section)
    return [one if isinstance(one, dict) else {} for one in found] if isinstance(found, list) else []


def link_pair(entry: Tables) -> tuple[str, str] | None:
    """Return the two cloud names of a link's table, or None where they cannot be read."""
    match entry.get("between"):
        case [str(first), str(second)]:
            return first, second
    return None


def entry_name(section: str, entry: Tables) -> str | None:
    """Return what users call an entry: a cloud by its name, a link as east-west."""
    if section == "link":
        pair = link_pair(entry)
        return "-".join(pair) if pair else None
    name = entry.get("name")
    return name if isinstance(name, str) else None


def _dotted(keys: Sequence[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def show_value(value: object) -> str:
    """Return a value as the file writes it, or the kind of thing it is where that is long."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return repr(value)
        case dict():
            return "a table"
        case list() | tuple():
            return "a list"
    return str(value)


def find_mistakes(error: ValidationError, schema: Node) -> list[Finding]:
    """Return what pydantic found in tables of a JSON schema, one finding for each place."""
    found: dict[Place, tuple[list[ErrorDetails], list[Node]]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] != CONFLICT:
            place, tables = _walk(detail, schema)
            found.setdefault(place, ([], tables))[0].append(detail)
    return [
        Finding(place=place, what=sentence(details), cure=_cure(details[0], _last_key(place), tables))
        for place, (details, tables) in found.items()
        # What is wrong inside of a list says more than that the list is wrong.
        if not any(other[: len(place)] == place for other in found if len(other) > len(place))
    ]


_IN_TOML: Final = {
    r"Input should be": "must be",
    r"dictionary( or instance of \w+)?": "table",
    r"an object to extract fields from": "table",
    r"a valid tuple": "a list",
    r"a valid string": "text",
    r"a valid integer": "a whole number",
    r"a valid boolean": "true or false",
    r"a valid ": "a ",
    r"True": "true",
    r"False": "false",
    r"greater than or equal to": "at least",
    r"less than or equal to": "at most",
    r"greater than": "more than",
    r"(String|Tuple) should have at least 1 .*": "must not be empty",
    r"Tuple should have (at most \d+) items.*": r"must have \1 entries",
    r"Field required|Missing required.*|Unable to extract tag.*": "is missing",
    r"Extra inputs are not permitted": "is not a known key",
    r"Unexpected keyword argument": "is none of its options",
    r"Input tag .* expected tags: ": "must be one of ",
}


def sentence(details: Sequence[ErrorDetails]) -> str:
    """Return what is wrong with one value; each branch of a union that it might be has its own error."""
    error = details[0].get("ctx", {}).get("error")
    if isinstance(error, FieldError):
        return error.what
    told = [detail["msg"] for detail in details]
    for pattern, words in _IN_TOML.items():
        told = [re.sub(pattern, words, one) for one in told]
    what = " or ".join([told[0], *(one.removeprefix("must be ") for one in told[1:])])
    value = details[0].get("ctx", {}).get("tag", details[0]["input"])
    return f"{what}, not {show_value(value)}" if what.startswith("must be") else what


def _walk(detail: ErrorDetails, schema: Node) -> tuple[Place, list[Node]]:
    """Return the place that the user wrote, and the tables of the schema that may hold its last key.

    Pydantic puts the branches of unions into a place.
    """
    place: list[str | int] = []
    tables, here = [schema], [schema]
    last = len(detail["loc"]) - 1
    for index, step in enumerate(detail["loc"]):
        if isinstance(step, int):
            place.append(step)
            continue
        inner = [table["properties"][step] for table in here if step in table["properties"]]
        if inner or (index == last and detail["type"] == "extra_forbidden"):
            place.append(step)
            tables, here = here, [table for node in inner for table in _tables_in(node, schema)]
        elif tagged := [table for table in here if step in _tags_of(table)]:
            here = tagged
    return (tuple(place), tables) if not detail["type"].startswith("union_tag") else ((*place, _TAG), here)


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


def _last_key(place: Place) -> str:
    return next((step for step in reversed(place) if isinstance(step, str)), "")


def _cure(detail: ErrorDetails, key: str, tables: list[Node]) -> str:
    context = detail.get("ctx", {})
    error = context.get("error")
    if isinstance(error, FieldError) and error.cure:
        return error.cure
    if detail["type"] == "too_long":
        return "leave some out"
    if detail["type"] == "union_tag_not_found":
        # The kind that takes all the keys given, or most of them, so that the cure is not refused.
        given = set(detail["input"]) if isinstance(detail["input"], dict) else set()
        nearest = max(tables, key=lambda table: len(given & table["properties"].keys()))
        return f'for example {_TAG} = "{_tags_of(nearest)[0]}"'
    if meant := meant_by(detail):
        return f"did you mean {meant!r}?"
    known = {name: node for table in reversed(tables) for name, node in table["properties"].items()}
    return _example(key, known[key]) if key in known else suggest(key, known)


def meant_by(detail: ErrorDetails) -> str | None:
    """Return the word of those expected that is nearest to the one given."""
    context = detail.get("ctx", {})
    known = re.findall("'([^']+)'", context.get("expected", context.get("expected_tags", "")))
    return closest(str(context.get("tag", detail["input"])), known)


def _example(key: str, node: Node) -> str:
    example = node.get("examples", [node.get("default")])[0]
    match example:
        case dict():
            return f"write a [{key}] table"
        case [dict(), *_]:
            return f"write a [[{key}]] table for each"
    return f"for example {key} = {json.dumps(example, ensure_ascii=False)}"
