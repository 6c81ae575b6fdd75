import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen.inventory import (
    Inventory,
    compare,
    event_keys,
    file_names,
    help_names,
    is_told,
    json_keys,
    new_lines,
    schema_keys,
)
from frozen.jobs import JOBS, SOURCE, TEXT, FrozenJob
from frozen.runs import Outcome
from frozen.weights import describe_difference, read_digests, whole_digest
from revisions import checked_out, commit_of
from safetensors.numpy import save_file

from isthmus.job.load import parse_job

Tensors = dict[str, Any]
TENSORS: Tensors = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), dtype=np.float32)}


def digest(folder: Path, **files: Tensors) -> str:
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors", metadata={"of": name})
    return whole_digest(read_digests(folder))


def test_a_digest_is_of_tensors_not_of_files(tmp_path: Path) -> None:
    one = digest(tmp_path / "one", model=TENSORS)
    names = {"model-00001-of-00002": {"b": TENSORS["b"]}, "model-00002-of-00002": {"a": TENSORS["a"]}}
    assert digest(tmp_path / "two", **names) == one


@pytest.mark.parametrize(
    "other",
    [
        {**TENSORS, "a": np.array([0, 1, 2, 3, 4, 6], dtype=np.float32)},
        {**TENSORS, "a": TENSORS["a"].reshape(2, 3)},
        {**TENSORS, "a": TENSORS["a"].view(np.int32)},
        {"c": TENSORS["a"], "b": TENSORS["b"]},
        {"a": TENSORS["a"]},
    ],
    ids=["bytes", "shape", "type", "name", "number"],
)
def test_a_digest_sees_every_change(tmp_path: Path, other: Tensors) -> None:
    assert digest(tmp_path / "other", model=other) != digest(tmp_path / "one", model=TENSORS)


def test_a_difference_is_told_in_one_line() -> None:
    old, new = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}
    told = describe_difference(old, new)
    assert told == "1 of 2 tensors differ, the first is b; 1 only in old, such as c; 1 only in new, such as d"
    assert describe_difference(old, old) == ""


def test_a_failed_run_is_like_no_other() -> None:
    assert Outcome(error="exit code 1").sha256 is None
    assert Outcome(digests={"a": "1"}).sha256 == Outcome(digests={"a": "1"}, took_s=3.0).sha256


@pytest.mark.parametrize("name", JOBS)
def test_every_frozen_job_can_be_read(name: str, tmp_path: Path) -> None:
    places = {SOURCE: str(tmp_path), TEXT: str(tmp_path / "short.txt")}
    text = JOBS[name].text("frozen", is_new=True, places=places)
    job = parse_job(text, file=tmp_path / "job.toml")
    assert [cloud.ranks for cloud in job.cloud] == list(JOBS[name].ranks)
    assert "{" not in str(job.data)


def test_the_present_tree_may_have_renamed_a_key() -> None:
    job = FrozenJob(about="", changes={"train": {"steps": 3}}, new={"train": {"steps": None, "span": 3}})
    old, new = (job.text("x", is_new=is_new, places={}) for is_new in (False, True))
    assert "steps = 3" in old
    assert "span" not in old
    assert "steps = 3" not in new
    assert "span = 3" in new


def test_keys_of_a_schema() -> None:
    schema = {
        "$defs": {
            "Cloud": {"properties": {"name": {"type": "string"}}},
            "Auto": {"properties": {"kind": {"const": "auto"}}},
            "Model": {"properties": {"inner": {"$ref": "#/$defs/Model"}}},
        },
        "properties": {
            "cloud": {"type": "array", "items": {"$ref": "#/$defs/Cloud"}},
            "model": {"anyOf": [{"$ref": "#/$defs/Model"}, {"type": "null"}]},
            "plan": {"oneOf": [{"$ref": "#/$defs/Auto"}]},
            "decay": {"enum": ["cosine", "linear"]},
        },
    }
    keys = {"cloud", "cloud[].name", "model", "model.inner", "plan", "plan.kind", "plan.kind=auto"}
    assert schema_keys(schema) == {*keys, "decay", "decay=cosine", "decay=linear"}


HELP = """
 Usage: python -m isthmus run [OPTIONS] {JOB}
 Without --cloud all clouds run here.
╭─ Arguments ────────────────────────────────────────────────────────────────────────╮
│ *    JOB      <path>  The job file.                                                │
│                       [required]                                                   │
╰────────────────────────────────────────────────────────────────────────────────────╯
╭─ Options ──────────────────────────────────────────────────────────────────────────╮
│ --json    -j      <bool>        Print JSON, like --pretty.                         │
│                                 [default: --json]                                  │
╰────────────────────────────────────────────────────────────────────────────────────╯
╭─ Commands ─────────────────────────────────────────────────────────────────────────╮
│ sign       Sign a request, at the operator; sign it again                          │
│            to renew.                                                               │
╰────────────────────────────────────────────────────────────────────────────────────╯
"""


def test_verbs_and_flags_of_help() -> None:
    assert help_names(HELP) == (["sign"], ["JOB", "--json", "-j"])


def test_events_and_files_of_a_run(tmp_path: Path) -> None:
    events = [
        {"event": "span", "kind": "forward", "track": "east"},
        {"event": "span", "kind": "data", "track": "east"},
        {"event": "fact", "kind": "step", "values": {"sent_bytes": {"west": 3}, "loss": 1.0}},
    ]
    for name in ("events/east.jsonl", "checkpoints/step-00000003/west/state.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("".join(f"{json.dumps(one)}\n" for one in events))
    step = {"values", "values.sent_bytes", "values.sent_bytes.CLOUD", "values.loss"}
    assert event_keys(tmp_path) == {
        "span forward",
        "span forward.track",
        "fact step",
        *(f"fact step.{key}" for key in step),
    }
    assert file_names(tmp_path) == {"events/CLOUD.jsonl", "checkpoints/step-N/CLOUD/state.json"}


def test_keys_of_json() -> None:
    found = json_keys({"clouds": [{"name": "east"}, {"rank": 1}], "east": {"x": None}})
    assert found == {"clouds", "clouds[].name", "clouds[].rank", "CLOUD", "CLOUD.x"}


def test_what_is_missing_must_be_told() -> None:
    old = Inventory(names={"flags": frozenset({"run --track", "run --cloud", "run --set"})})
    new = Inventory(names={"flags": frozenset({"run --set", "run --new"})})
    (change,) = compare(old, new, told="* `--track` is gone.").values()
    assert change.missing == ("run --cloud",)
    assert change.excused == ("run --track",)
    assert change.added == ("run --new",)
    assert compare(old, old, told="") == {}


def test_what_goes_with_all_below_it_is_told_once() -> None:
    old = Inventory(names={"keys": frozenset({"limits", "limits.budget", "limits.budget=no", "train.steps"})})
    new = Inventory(names={"keys": frozenset[str]()})
    told = "`limits` and the steps of `train` are gone"
    assert compare(old, new, told=told)["keys"].missing == ("train.steps",)


@pytest.mark.parametrize(
    ("name", "is_so"),
    [("run --track", True), ("train.decay", True), ("train.decay=cosine", False), ("fact delay", False)],
)
def test_names_are_told_in_backticks_alone(name: str, is_so: bool) -> None:
    assert is_told(name, "No `--track` any more; `train.decay` and a delay are gone.") == is_so


def test_only_new_lines_of_a_changelog_count() -> None:
    assert new_lines("a\nb\n", "a\nc\nb\n") == "c"


def test_a_folder_with_a_tree_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "isthmus").mkdir()
    (tmp_path / "isthmus" / "__init__.py").touch()
    with checked_out(str(tmp_path)) as tree:
        assert tree.path == tmp_path.resolve()
    assert commit_of(str(tmp_path)) == str(tmp_path.resolve())


def test_an_unknown_revision_has_a_cure() -> None:
    with pytest.raises(SystemExit, match="--old"):
        commit_of("no-such-revision")
