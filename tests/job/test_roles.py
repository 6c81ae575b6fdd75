"""A key of a job changes what a run means, unless it is one of operation or of a site."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from isthmus.job import Job
from isthmus.job.spec import KEY_ROLES, Change, KeyRole, disagreement, job_schema, tell_changes
from tests.job.strategies import jobs, with_jobs
from tests.job.test_spec import DESIGN, parse

SCHEMA: Any = job_schema()
# A text or a table, and tables whose keys are not ours.
WHOLE = {"link.codec", "model.config", "strategy.generator", "strategy.generators"}


def tables_of(node: Any) -> list[Any]:
    """The tables that a node of the schema may stand for."""
    if "$ref" in node:
        return [SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]]
    inner = [*node.get("anyOf", ()), *node.get("oneOf", ()), *([node["items"]] if "items" in node else [])]
    return [table for one in inner for table in tables_of(one)]


def keys_of(node: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a table of the schema, and of the tables in it."""
    for key, value in node["properties"].items():
        tables = [] if prefix + key in WHOLE else tables_of(value)
        if not tables or prefix + key in KEY_ROLES:
            yield prefix + key
        for table in tables if prefix + key not in KEY_ROLES else ():
            yield from keys_of(table, f"{prefix}{key}.")


def test_only_keys_of_the_schema_have_roles() -> None:
    assert set(KEY_ROLES) <= set(keys_of(SCHEMA))


def test_the_page_lists_the_keys_of_operation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "job.md").read_text()
    table = page.partition("| section | keys of operation |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `\[+(\w+)\]+` \| (.*) \|$", table, re.MULTILINE)
    keys = {(section, key) for section, text in rows for key in re.findall(r"`(\w+)`", text)}
    every = [key.split(".") for key, role in KEY_ROLES.items() if role is KeyRole.OPERATION]
    assert keys == {(parts[0], parts[-1]) for parts in every}


MEANING = [
    ("name=other", 'name "two-clouds", now "other"'),
    ("seed=8", "seed 7, now 8"),
    ("model.source=other", 'model.source "Qwen/Qwen3-0.6B", now "other"'),
    ("data.sequence_length=1", "data.sequence_length 2048, now 1"),
    ("cloud.west.ranks=15", "cloud.west.ranks 16, now 15"),
    ("link.0.boundary=hidden", "link.east-west.boundary "),
    ("strategy.microbatches=15", "strategy.microbatches 16, now 15"),
    ("strategy.layers=[3, 4]", "strategy.layers unset, now [3, 4]"),
    ("train.batch_tokens=2048", "train.batch_tokens 4096, now 2048"),
    ("train.learning_rate=0.5", "train.learning_rate 0.001, now 0.5"),
    ("train.precision=bfloat16", 'train.precision "float32", now "bfloat16"'),
]
OPERATION = [
    ("cloud.east.listen=east.example.com:7601", "cloud.east.listen "),
    ("cloud.west.device=cpu", 'cloud.west.device "npu", now "cpu"'),
    ("cloud.east.memory=40 GiB", 'cloud.east.memory "80 GiB", now "40 GiB"'),
    ("link.0.codec=raw", "link.east-west.codec"),
    ("link.0.guard_every=0", "link.east-west.guard_every 10, now 0"),
    ("link.0.usd_per_gib=1", "link.east-west.usd_per_gib 0.08, now 1"),
    ("train.steps=11", "train.steps 10, now 11"),
    ("train.evaluate_every=7", "train.evaluate_every 100, now 7"),
    ("checkpoint.every=91 s", 'checkpoint.every "90 s", now "91 s"'),
]
SITE = [
    "cloud.west.certificates=elsewhere",
    "cloud.west.proxy=http://10.0.0.1:3128",
    "cloud.east.gateway=10.0.0.1:7600",
    "link.0.rtt=3 s",
    "link.0.bandwidth=1 Mbps",
    "limits.budget_usd=5",
]


@pytest.mark.parametrize(("override", "told"), MEANING)
def test_what_changes_the_meaning_is_another_run_and_is_told(override: str, told: str) -> None:
    before, now = parse(DESIGN), parse(DESIGN, override)
    assert now.meaning_digest != before.meaning_digest
    assert now.digest != before.digest
    (change,) = now.changes_from(before, KeyRole.MEANING)
    assert tell_changes([change]).startswith(told)
    assert now.changes_from(before, KeyRole.OPERATION) == ()


@pytest.mark.parametrize(("override", "told"), OPERATION)
def test_what_is_operated_otherwise_is_the_same_run_on_which_clouds_agree(override: str, told: str) -> None:
    before, now = parse(DESIGN), parse(DESIGN, override)
    assert now.meaning_digest == before.meaning_digest
    assert now.digest != before.digest
    changes = now.changes_from(before, KeyRole.OPERATION)
    assert any(tell_changes([change]).startswith(told) for change in changes), changes
    assert now.changes_from(before, KeyRole.MEANING) == ()


@pytest.mark.parametrize("override", SITE)
def test_what_is_a_sites_own_is_in_no_digest(override: str) -> None:
    before, now = parse(DESIGN), parse(DESIGN, override)
    assert (now.meaning_digest, now.digest) == (before.meaning_digest, before.digest)


def test_the_order_of_clouds_is_that_of_stages_and_links_have_none() -> None:
    third = '[[cloud]]\nname = "mid"\nlisten = "mid:1"\n'
    links = ['[[link]]\nbetween = ["east", "mid"]\n', '[[link]]\nbetween = ["mid", "west"]\n']
    before = parse(DESIGN + third + "".join(links))
    assert parse(DESIGN + third + "".join(reversed(links))).meaning_digest == before.meaning_digest
    east, west = (DESIGN[DESIGN.index(f'[[cloud]]\nname = "{name}"') :] for name in ("east", "west"))
    east, west = east[: east.index("[[cloud]]", 1)], west[: west.index("[[link]]")]
    turned = parse(DESIGN.replace(east + west, west + "\n" + east))
    assert turned.meaning_digest != parse(DESIGN).meaning_digest
    assert turned.changes_from(parse(DESIGN), KeyRole.MEANING) == (
        Change("the order of clouds", '["east", "west"]', '["west", "east"]'),
    )


def test_a_cloud_that_comes_or_goes_is_told_by_its_name() -> None:
    third = '[[cloud]]\nname = "mid"\nlisten = "mid:1"\n[[link]]\nbetween = ["east", "mid"]\n'
    changes = parse(DESIGN).changes_from(parse(DESIGN + third), KeyRole.MEANING)
    told = {change.key: (change.there, change.here) for change in changes}
    assert told["cloud.mid.name"] == ('"mid"', "unset")
    assert told["link.east-mid.between"] == ('["east", "mid"]', "unset")


@with_jobs
@given(jobs())
def test_a_job_has_not_changed_from_itself(job: Job) -> None:
    assert all(job.changes_from(job, role) == () for role in KeyRole)


def test_where_two_sites_disagree_is_told_with_both_values() -> None:
    told = "{key} is {there} at west and {here} at east"
    here, there = parse(DESIGN), parse(DESIGN, "train.steps=11", "seed=8", "link.0.rtt=3 s")
    assert disagreement(there.agreement, here.agreement, told) == (
        "seed is 8 at west and 7 at east; train.steps is 11 at west and 10 at east"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 4000])
def test_an_agreement_that_cannot_be_read_is_not_told(text: str) -> None:
    assert disagreement(text, parse(DESIGN).agreement, "{key}") == ""


@with_jobs
@given(jobs())
def test_an_agreement_holds_all_that_clouds_must_agree_on(job: Job) -> None:
    text = job.agreement
    assert text.isascii()
    assert len(text) <= 4096
    assert not text or {"name", "cloud.east.name"} <= json.loads(text).keys()
