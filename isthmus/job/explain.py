"""From pydantic's validation errors to what is wrong and its cure, in the words of the job file."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from isthmus.job.fields import Frozen
from isthmus.job.findings import FieldError, Finding, Place, show_value, suggest
from isthmus.job.spec import CONFLICT, Job
from isthmus.units import closest

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
    meant = _meant(detail)
    if meant is not None:
        return f"did you mean {meant!r}?"
    *parents, key = (step for step in place if isinstance(step, str))
    fields = _fields_of(_models_at(parents))
    return _example(key, fields[key]) if key in fields else suggest(key, fields)


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
