"""The schema, the models, the examples and the page about the job file name the same keys."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from isthmus.job import Job, job_schema
from tests.job.strategies import jobs, with_jobs

ROOT = Path(__file__).parents[2]
SCHEMA: Any = job_schema()


def resolved(node: Any) -> list[Any]:
    """Return the schemas that a node may stand for."""
    if "$ref" in node:
        return [SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]]
    choices = node.get("anyOf") or node.get("oneOf")
    return [one for choice in choices for one in resolved(choice)] if choices else [node]


def unknown_keys(value: object, node: Any) -> Iterator[str]:
    """Yield the keys of a TOML value that its schema does not have."""
    nodes = resolved(node)
    if isinstance(value, list):
        for entry in value:
            for one in nodes:
                yield from unknown_keys(entry, one.get("items", {}))
    elif isinstance(value, dict) and not any(one.get("additionalProperties") is True for one in nodes):
        known = {key: inner for one in nodes for key, inner in one.get("properties", {}).items()}
        for key, inner in value.items():
            yield from unknown_keys(inner, known[key]) if key in known else [key]


def all_properties() -> Iterator[tuple[str, Any]]:
    for node in (SCHEMA, *SCHEMA["$defs"].values()):
        yield from node["properties"].items()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_use_the_keys_of_the_schema(example: Path) -> None:
    assert list(unknown_keys(tomllib.loads(example.read_text()), SCHEMA)) == []


@with_jobs
@given(jobs())
def test_every_job_uses_the_keys_of_the_schema(job: Job) -> None:
    assert list(unknown_keys(job.tables(), SCHEMA)) == []


def test_the_walk_over_the_schema_finds_strangers() -> None:
    job = {"nam": "x", "link": [{"between": [], "codec": {"foward": "raw"}}], "strategy": {"knd": "auto"}}
    assert list(unknown_keys(job, SCHEMA)) == ["nam", "foward", "knd"]


def test_every_property_has_a_description_and_an_example() -> None:
    for key, node in all_properties():
        assert node["description"], key
        assert node["examples"], key


def test_no_table_takes_unknown_keys() -> None:
    assert all(node["additionalProperties"] is False for node in (SCHEMA, *SCHEMA["$defs"].values()))


def test_defaults_are_written_as_in_the_file() -> None:
    link = SCHEMA["$defs"]["LinkSpec"]["properties"]
    assert link["heartbeat_timeout"]["default"] == "30 s"
    assert link["codec"]["default"] == "raw"
    assert "default" not in link["rtt"]


def test_the_page_names_every_key() -> None:
    page = (ROOT / "docs" / "job.md").read_text()
    missing = [key for key, _ in all_properties() if f"`{key}`" not in page]
    assert missing == []


def test_the_page_shows_the_example() -> None:
    assert (ROOT / "examples" / "two-clouds.toml").read_text() in (ROOT / "docs" / "job.md").read_text()
