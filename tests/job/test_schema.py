"""The schema, the models, the examples and the page about the job file name the same keys."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from isthmus.job import Job
from isthmus.job.spec import job_schema
from tests.job.strategies import jobs, with_jobs

ROOT = Path(__file__).parents[2]
SCHEMA: Any = job_schema()
PAGE = (ROOT / "docs" / "job.md").read_text()
JOB = "Job"
SECTIONS = {
    "The job": [JOB],
    "`[[cloud]]`": ["CloudSpec"],
    "`[[link]]`": ["LinkSpec"],
    "`[model]`": ["ModelSpec"],
    "`[model.lora]`": ["LoraSpec"],
    "`[model.abnet]`": ["ABNetSpec"],
    "`[data]`": ["DataSpec"],
    "`[strategy]`": ["AutoStrategy", "PipelineStrategy", "DataStrategy", "GeneratorDiscriminatorStrategy"],
    "`[strategy.generators.CLOUD]`": ["GeneratorSpec"],
    "`[cloud.data]`": ["CloudData"],
    "`[train]`": ["TrainSpec"],
    "`[checkpoint]`": ["CheckpointSpec"],
    "`[limits]`": ["LimitsSpec"],
    "`[[accelerator]]`": ["AcceleratorSpec"],
}


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
        by_any_name = [extra for one in nodes if isinstance(extra := one.get("additionalProperties"), dict)]
        for key, inner in value.items():
            if by_any_name and key not in known:
                yield from unknown_keys(inner, by_any_name[0])
            else:
                yield from unknown_keys(inner, known[key]) if key in known else [key]


def all_properties() -> Iterator[tuple[str, Any]]:
    for node in (SCHEMA, *SCHEMA["$defs"].values()):
        yield from node["properties"].items()


def properties_of(heading: str) -> dict[str, Any]:
    """Of the tables that a heading of the page is about."""
    nodes = [SCHEMA if name == JOB else SCHEMA["$defs"][name] for name in SECTIONS[heading]]
    return {key: node for one in nodes for key, node in one["properties"].items()}


# All but a script of faults are jobs.
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.toml")) if path.name != "faults.toml"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_use_the_keys_of_the_schema(example: Path) -> None:
    assert list(unknown_keys(tomllib.loads(example.read_text()), SCHEMA)) == []


@with_jobs
@given(jobs())
def test_every_job_uses_the_keys_of_the_schema(job: Job) -> None:
    assert list(unknown_keys(job.tables(), SCHEMA)) == []


def test_the_walk_over_the_schema_finds_strangers() -> None:
    job = {"nam": "x", "link": [{"between": [], "codec": {"foward": "raw"}}], "strategy": {"knd": "auto"}}
    assert list(unknown_keys(job, SCHEMA)) == ["nam", "foward", "knd"]


def test_every_property_has_a_description_and_an_example_or_a_default() -> None:
    for key, node in all_properties():
        assert node["description"], key
        assert node.get("examples") or "default" in node, key


def test_no_table_takes_unknown_keys() -> None:
    assert all(node["additionalProperties"] is False for node in (SCHEMA, *SCHEMA["$defs"].values()))


def test_defaults_are_written_as_in_the_file() -> None:
    link = SCHEMA["$defs"]["LinkSpec"]["properties"]
    assert link["heartbeat_timeout"]["default"] == "30 s"
    assert link["codec"]["default"] == "raw"
    assert "default" not in link["rtt"]


def rows_of_the_page() -> dict[str, dict[str, str]]:
    """By the heading that they stand under, the keys of the page's tables and their defaults."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    rows = re.compile(r"^\| `(\w+)` \| ([^|]*?) \|", re.MULTILINE)
    return {heading: dict(rows.findall(text)) for heading, text in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_has_every_key_of_a_section_and_no_other(heading: str) -> None:
    assert set(rows_of_the_page()[heading]) == set(properties_of(heading))


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_has_every_default(heading: str) -> None:
    on_page = {key: text.strip("`") for key, text in rows_of_the_page()[heading].items()}
    defaults = {key: node["default"] for key, node in properties_of(heading).items() if "default" in node}
    plain = {key: value for key, value in defaults.items() if not isinstance(value, dict | list)}
    assert {key: tomllib.loads(f"value = {on_page[key]}")["value"] for key in plain} == plain


def test_no_section_is_left_out_of_the_page() -> None:
    on_page = {name for names in SECTIONS.values() for name in names}
    assert on_page == {*SCHEMA["$defs"], JOB} - {"CodecSpecs"}
    assert "`forward`" in PAGE
    assert "`backward`" in PAGE


def test_the_page_shows_the_example() -> None:
    assert (ROOT / "examples" / "two-clouds.toml").read_text() in (ROOT / "docs" / "job.md").read_text()
