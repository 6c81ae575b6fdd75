"""Stores: files that are whole or not there; records of tensors that are found by name and never trusted."""

import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isthmus.errors import UserError
from isthmus.train.records import (
    MANIFEST_FILE,
    DiskStore,
    Manifest,
    Records,
    RemoteStore,
    ShardRows,
    Store,
    merged,
    open_store,
)

NAME = "step-00000001/north"


@pytest.fixture(params=["disk", "fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "disk":
        return DiskStore(tmp_path / "store")
    return RemoteStore(f"memory://{uuid.uuid4().hex}/prefix")


def rows(tensors: dict[str, torch.Tensor]) -> dict[str, ShardRows]:
    return {name: ShardRows(own=one, shape=tuple(one.shape)) for name, one in tensors.items()}


TENSORS = {
    "model.norm.weight": torch.arange(4.0),
    "optimizer/step/model.norm.weight": torch.tensor(3.0),
    "wire/0/west.0/basis": torch.ones(2, 3, dtype=torch.bfloat16),
}


def stored(store: Store) -> Records:
    records = Records(store)
    records.commit(NAME, records.put(NAME, "0.ab", rows(TENSORS), {"step": 1, "layers": [0, 4]}))
    return records


def test_files_come_back_by_name_and_by_part(store: Store) -> None:
    assert store.list() == set()
    store.put("a/b/c", [b"12", memoryview(b"345"), bytearray(b"")])
    store.put("a/d", [b""])
    assert store.list() == {"a/b/c", "a/d"}
    assert store.get("a/b/c") == b"12345"
    assert store.get("a/b/c", 1, 3) == b"23"
    assert store.get("a/b/c", 3, 99) == b"45"
    store.put("a/b/c", [b"6"])
    assert store.get("a/b/c") == b"6"
    store.remove("a/b/c")
    store.remove("a/b/c")
    assert store.list() == {"a/d"}
    with pytest.raises(FileNotFoundError):
        store.get("a/b/c")


def test_a_write_that_fails_leaves_the_file_of_before_and_no_folder_is_left_empty(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)

    def cut_short() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    store.put("a/b", [b"old"])
    with pytest.raises(OSError, match="No space"):
        store.put("a/b", cut_short())
    assert store.get("a/b") == b"old"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    store.remove("a/b")
    assert not list(tmp_path.iterdir())


def test_the_job_says_where_the_store_of_a_run_is(tmp_path: Path) -> None:
    run = tmp_path / "demo" / "1"
    assert open_store(run, None).place == str(run / "checkpoints")
    for address in ("/mnt/nfs", "file:///mnt/nfs"):
        assert open_store(run, address).place == "/mnt/nfs/demo/1"
    assert open_store(run, "memory://bucket/prefix/").place == "memory://bucket/prefix/demo/1"
    with pytest.raises(UserError, match="nowhere"):
        open_store(run, "nowhere://bucket")


def test_a_record_is_files_of_tensors_and_a_manifest_with_digests(store: Store) -> None:
    records = stored(store)
    files = {"optimizer.0.ab.safetensors", "weights.0.ab.safetensors", "wire.0.ab.safetensors"}
    assert records.list() == {NAME: {MANIFEST_FILE, *files}}
    manifest = records.manifest(NAME)
    assert manifest.facts == {"step": 1, "layers": [0, 4]}
    basis = manifest.tensors["wire/0/west.0/basis"]
    assert (basis.pieces[0].file, basis.shape, basis.dtype) == ("wire.0.ab.safetensors", (2, 3), "bfloat16")
    for file, about in manifest.files.items():
        data = store.get(f"{NAME}/{file}")
        assert (about.num_bytes, about.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    found = records.get(NAME, manifest, TENSORS)
    for name, expected in TENSORS.items():
        assert found[name].load().dtype == expected.dtype
        assert torch.equal(found[name].load(), expected)
    assert records.check(NAME) is None


def test_rows_are_read_from_the_files_of_all_ranks(store: Store) -> None:
    """Three ranks have written unequal parts of one tensor, one of them nothing."""
    whole = torch.randn(5, 2, 3)
    records, parts = Records(store), []
    for rank, (start, stop) in enumerate([(0, 3), (3, 5), (5, 5)]):
        own = ShardRows(own=whole[start:stop], shape=(5, 2, 3), start=start)
        parts.append(records.put(NAME, f"{rank}.ab", {"w": own}, {}))
    manifest = merged(parts, {})
    records.commit(NAME, manifest)
    tensor = records.get(NAME, records.manifest(NAME), ["w"])["w"]
    for start in range(6):
        for stop in range(start, 6):
            assert torch.equal(tensor.load(start, stop), whole[start:stop])
    assert torch.equal(tensor.load(4, 9), whole[4:])
    assert len(manifest.files) == 2
    for some in (parts[:1], parts[1:], [parts[0], parts[0]]):
        with pytest.raises(ValueError, match="no rank has saved all of w"):
            merged(some, {})


def test_ranks_that_disagree_about_a_shape_make_no_record(store: Store) -> None:
    records = Records(store)
    parts = [records.put(NAME, f"{n}.ab", rows({"w": torch.zeros(2, n)}), {}) for n in (1, 2)]
    with pytest.raises(ValueError, match="different shapes"):
        merged(parts, {})


def test_only_the_files_of_what_is_asked_for_must_be_whole(store: Store) -> None:
    records = stored(store)
    store.remove(f"{NAME}/wire.0.ab.safetensors")
    manifest = records.manifest(NAME)
    assert records.get(NAME, manifest, ["model.norm.weight"]).keys() == {"model.norm.weight"}
    assert str(records.check(NAME)).startswith("wire.0.ab.safetensors: ")


@pytest.mark.parametrize("harm", ["flipped", "truncated", "longer"])
def test_a_file_that_is_not_as_it_was_written_is_refused(store: Store, harm: str) -> None:
    stored(store)
    path = f"{NAME}/weights.0.ab.safetensors"
    data = store.get(path)
    changed = {"flipped": data[:-1] + b"!", "truncated": data[:-1], "longer": data + b"!"}[harm]
    store.put(path, [changed])
    again = Records(store)
    assert "weights.0.ab.safetensors" in str(again.check(NAME))
    with pytest.raises(UserError, match="cannot be used"):
        again.get(NAME, again.manifest(NAME), ["model.norm.weight"])


def test_tensors_that_share_memory_are_saved_each(store: Store) -> None:
    bias = torch.arange(4.0)
    records = Records(store)
    given = rows({"a.bias": bias, "b.bias": bias, "c.bias": bias[1:], "d": torch.randn(3, 4).T})
    records.commit(NAME, records.put(NAME, "0.ab", given, {}))
    found = records.get(NAME, records.manifest(NAME), given)
    assert all(torch.equal(found[name].load(), one.own) for name, one in given.items())


def test_a_record_is_removed_with_all_of_its_files(store: Store) -> None:
    records = stored(store)
    records.remove(NAME, records.list()[NAME])
    assert store.list() == set()


FILE = {"num_bytes": 8, "sha256": "0" * 64}
PIECE = {"file": "a.safetensors", "offset": 4, "start": 0, "num_rows": 1}
TENSOR = {"shape": [1], "dtype": "float32", "pieces": [PIECE]}


def given(**changes: Any) -> dict[str, Any]:
    return {"files": {"a.safetensors": FILE}, "tensors": {"a": {**TENSOR, **changes}}}


def test_a_plain_manifest_makes_sense() -> None:
    assert Manifest.model_validate({"format": 2, "facts": {}, **given()}).missing is None


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"facts": None},
        {"files": {"../../../passwd.safetensors": FILE}},
        {"files": {"a.safetensors": {**FILE, "num_bytes": -1}}},
        {"files": {"a.safetensors": {**FILE, "sha256": "none"}}},
        given(shape=["x"]),
        given(dtype="object"),
        given(dtype="nn"),
        given(pieces=[{**PIECE, "file": "b.safetensors"}]),
        given(pieces=[{**PIECE, "offset": 5}]),
        given(shape=[2**40], pieces=[{**PIECE, "num_rows": 2**40}]),
        given(pieces=[]),
        {"tensors": []},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    records = stored(DiskStore(tmp_path))
    path = tmp_path / NAME / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert MANIFEST_FILE in str(records.check(NAME))


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    records = stored(DiskStore(tmp_path))
    (tmp_path / NAME / MANIFEST_FILE).write_text(text)
    assert records.check(NAME) is not None
    with pytest.raises(UserError, match="cannot be used"):
        records.manifest(NAME)


def test_what_is_written_is_read_by_the_library(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "codes": torch.arange(5, dtype=torch.uint8),
        "weight": torch.randn(3, 4).T,
        "half": torch.randn(3, dtype=torch.bfloat16),
        "step": torch.tensor(7.0),
        "counts": torch.arange(3),
        "nothing": torch.empty(0, 4),
    }
    records = Records(DiskStore(tmp_path))
    manifest = records.put(NAME, "0.ab", rows(tensors), {})
    found = load_file(tmp_path / NAME / "weights.0.ab.safetensors")
    assert found.keys() == tensors.keys()
    ours = records.get(NAME, manifest, tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert torch.equal(ours[name].load(), tensor)


def test_a_save_may_be_ended_between_two_tensors(store: Store) -> None:
    records, asked = Records(store), list[int]()

    def check() -> None:
        asked.append(0)
        if len(asked) > 2:
            raise OSError("the run has ended")

    with pytest.raises(OSError, match="has ended"):
        records.put(
            NAME, "0.ab", {name: replace(one) for name, one in rows(TENSORS).items()}, {}, check=check
        )
    assert MANIFEST_FILE not in {path.rpartition("/")[2] for path in store.list()}
