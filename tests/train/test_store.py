"""Stores: records that are whole or not there, found by the names of their tensors, and never trusted."""

import functools
import hashlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isthmus.errors import UserError
from isthmus.train.checkpoint import lazily
from isthmus.train.store import MANIFEST_FILE, DiskStore, LazyTensor, files_of, write_tensors

NAME = "step-00000001/north"


def stored(folder: Path) -> DiskStore:
    store = DiskStore(folder)
    tensors = {
        "model.norm.weight": torch.arange(4.0),
        "optimizer/step/model.norm.weight": torch.tensor(3.0),
        "wire/0/west.0/basis": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    store.put(NAME, lazily(tensors), {"step": 1, "layers": [0, 4]})
    return store


def test_a_record_is_files_of_tensors_and_a_manifest_with_digests(tmp_path: Path) -> None:
    store = stored(tmp_path)
    assert store.names() == (NAME,)
    assert sorted(path.name for path in (tmp_path / NAME).iterdir()) == [
        MANIFEST_FILE,
        "optimizer.safetensors",
        "weights.safetensors",
        "wire.safetensors",
    ]
    manifest = store.manifest(NAME)
    assert manifest.facts == {"step": 1, "layers": [0, 4]}
    basis = manifest.tensors["wire/0/west.0/basis"]
    assert (basis.file, basis.shape, basis.dtype) == ("wire.safetensors", (2, 3), "bfloat16")
    for file, about in manifest.files.items():
        data = (tmp_path / NAME / file).read_bytes()
        assert (about.num_bytes, about.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    found = store.get(NAME, ["wire/0/west.0/basis", "model.norm.weight"])
    assert found["model.norm.weight"].load().tolist() == [0, 1, 2, 3]
    assert found["wire/0/west.0/basis"].load().dtype == torch.bfloat16


def test_only_the_files_of_what_is_asked_for_must_be_whole(tmp_path: Path) -> None:
    store = stored(tmp_path)
    (tmp_path / NAME / "wire.safetensors").unlink()
    assert store.get(NAME, ["model.norm.weight"]).keys() == {"model.norm.weight"}
    assert store.check(NAME) == "wire.safetensors: No such file or directory"


def test_tensors_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    bias = torch.arange(4.0)
    store = DiskStore(tmp_path)
    store.put(NAME, lazily({"a.bias": bias, "b.bias": bias, "c.bias": bias[1:]}), {})
    found = store.get(NAME, ["a.bias", "b.bias", "c.bias"])
    assert [one.load().tolist() for one in found.values()] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]


def test_a_record_takes_another_name_and_goes_with_its_folder(tmp_path: Path) -> None:
    store = stored(tmp_path)
    store.rename(NAME, f"{NAME}.aside")
    assert store.names() == (f"{NAME}.aside",)
    store.remove(f"{NAME}.aside")
    assert not list(tmp_path.iterdir())


FILE = {"num_bytes": 1, "sha256": "0" * 64}
TENSOR = {"file": "a.safetensors", "shape": [1], "dtype": "float32"}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"facts": None},
        {"files": {"../../../passwd.safetensors": FILE}},
        {"files": {"a.safetensors": {**FILE, "num_bytes": -1}}},
        {"files": {"a.safetensors": {**FILE, "sha256": "none"}}},
        {"files": {"a.safetensors": FILE}, "tensors": {"a": {**TENSOR, "file": "b.safetensors"}}},
        {"files": {"a.safetensors": FILE}, "tensors": {"a": {**TENSOR, "shape": ["x"]}}},
        {"tensors": []},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    store = stored(tmp_path)
    path = tmp_path / NAME / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match="cannot be used"):
        store.get(NAME, ["model.norm.weight"])
    assert store.check(NAME) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    store = stored(tmp_path)
    (tmp_path / NAME / MANIFEST_FILE).write_text(text)
    assert store.check(NAME) is not None


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def load(value: int) -> torch.Tensor:
        assert all(one() is None for one in alive), "an earlier tensor is still in memory"
        tensor = torch.full((5,), value, dtype=torch.float32)
        alive.append(weakref.ref(tensor))
        return tensor

    tensors = {
        f"{number}.weight": LazyTensor(shape=(5,), dtype=torch.float32, load=functools.partial(load, number))
        for number in range(4)
    }
    store = DiskStore(tmp_path)
    store.put(NAME, tensors, {})
    found = store.get(NAME, list(tensors))
    assert [one.load()[0].item() for one in found.values()] == [0, 1, 2, 3]


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
    path = tmp_path / "all.safetensors"
    about = write_tensors(path, files_of(lazily(tensors))["weights.safetensors"])
    assert about.num_bytes == path.stat().st_size
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
