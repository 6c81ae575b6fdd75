"""Tokens are made once, kept, mapped by all, and made again only where they would be others."""

import errno
import fcntl
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isthmus.job import Job
from isthmus.train.data import token_files
from isthmus.train.data.rows import Rows, open_rows
from isthmus.train.data.samples import Arrays, Pick, Recipe, Samples
from isthmus.train.data.token_files import TokenFiles, Tokens
from isthmus.train.data.tokenizer import train_tokenizer
from isthmus.train.data.training_data import TrainingData, open_data
from tests.train.test_data_steps import CONFIG, job

MADE = "making the tokens"
TASKS = {
    "causal-lm": "tales",
    "masked-lm": "tales",
    "sequence-classification": "messages",
    "token-classification": "names",
    "question-answering": "questions",
}


@dataclass(slots=True)
class Maker:
    """Makes few arrays, and counts how often."""

    num_made: int = 0
    notes: list[str] = field(default_factory=list)

    def make(self) -> Iterator[Arrays]:
        self.num_made += 1
        yield {"ids": np.arange(3, dtype=np.uint16), "labels": np.empty((2, 0), np.int32)}
        yield {"ids": np.arange(4, dtype=np.uint16), "labels": np.empty((1, 0), np.int32)}

    def files(self, folder: Path) -> TokenFiles:
        return TokenFiles(folder=folder, note=self.notes.append)


def assert_made(found: Tokens) -> None:
    arrays = found.arrays
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "ids": [0, 1, 2, 0, 1, 2, 3],
        "labels": [[], [], []],
    }
    assert arrays["ids"].dtype == np.uint16


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def read_all(samples: Samples | None) -> list[Any]:
    assert samples is not None
    read = [samples.read(Pick(epoch=1, index=index)) for index in range(len(samples))]
    return [
        (one.ids.tolist(), one.labels.tolist(), None if one.token_types is None else one.token_types.tolist())
        for one in read
    ]


def job_of(task: str, **data: object) -> Job:
    config = CONFIG if task == "causal-lm" else {"model_type": "bert", "vocab_size": 600}
    return job(config, **{"source": f"builtin:{TASKS[task]}", "task": task, **data})


@pytest.mark.parametrize("task", TASKS)
def test_kept_tokens_are_those_made_in_memory(task: str, tmp_path: Path) -> None:
    maker = Maker()

    def opened(tokens: TokenFiles | None) -> TrainingData:
        return open_data(job_of(task), tokenizer_folder=tmp_path / "tokenizer", tokens=tokens)

    in_memory = opened(None)
    for _ in range(2):
        mapped = opened(maker.files(tmp_path / "tokens"))
        assert read_all(mapped.samples) == read_all(in_memory.samples)
        assert read_all(mapped.validation) == read_all(in_memory.validation)
        assert mapped.facts == in_memory.facts
        assert mapped.sha256 == in_memory.sha256
    assert maker.notes == [f"{MADE}, which are kept in {tmp_path / 'tokens'}"]


def test_the_digest_is_of_the_content_and_not_of_names_and_times(tmp_path: Path) -> None:
    source, tokenizer = tmp_path / "a.txt", tmp_path / "tokenizer"
    texts = [f"Sentence {number} of a small corpus.\n\n" for number in range(400)]

    def digest(name: str = "a.txt") -> str:
        tokens = Maker().files(tmp_path / "tokens")
        job = job_of("causal-lm", source=str(tmp_path / name))
        return open_data(job, tokenizer_folder=tokenizer, tokens=tokens).sha256

    source.write_text("".join(texts))
    before = digest()
    os.utime(source, ns=(1, 1))
    assert digest() == before
    source.rename(tmp_path / "b.txt")
    assert digest("b.txt") == before
    source.write_text("".join(texts[::-1]))
    os.utime(source, ns=(1, 1))
    assert digest() != before


def test_what_is_mapped_cannot_be_written(tmp_path: Path) -> None:
    maker = Maker()
    found = maker.files(tmp_path).get("a", maker.make)
    assert_made(found)
    with pytest.raises(ValueError, match="read-only"):
        found.arrays["ids"][0] = 7


def test_one_makes_them_while_others_wait(tmp_path: Path) -> None:
    maker, has_begun = Maker(), threading.Event()

    def make() -> Iterator[Arrays]:
        has_begun.set()
        while len(maker.notes) < 4:
            time.sleep(0.01)
        yield from maker.make()

    def ask() -> Tokens:
        return maker.files(tmp_path).get("a", make)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask)
        has_begun.wait()
        others = [pool.submit(ask) for _ in range(3)]
        for one in (first, *others):
            assert_made(one.result())
    assert maker.num_made == 1
    assert sorted(note.split()[0] for note in maker.notes) == ["making", "waiting", "waiting", "waiting"]


def make_for_ever(folder: Path, has_begun: Any) -> None:
    def make() -> Iterator[Arrays]:
        yield from Maker().make()
        has_begun.set()
        time.sleep(600)

    Maker().files(folder).get("a", make)


@pytest.mark.slow
def test_when_the_maker_is_killed_the_next_one_makes_them(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    has_begun = context.Event()
    process = context.Process(target=make_for_ever, args=(tmp_path, has_begun), daemon=True)
    process.start()
    has_begun.wait()
    maker = Maker()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: maker.files(tmp_path).get("a", maker.make))
        while not maker.notes:
            time.sleep(0.01)
        process.kill()
        assert_made(asked.result())
    process.join()
    assert [note.split()[0] for note in maker.notes] == ["waiting", "making"]
    assert names(tmp_path) == {"a"}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("ids", b"short"),
        ("ids", bytes(16)),
        ("arrays.json", b"{"),
        ("arrays.json", b"[]"),
        ("arrays.json", b'{"ids": ["|O", [1]]}'),
        ("arrays.json", b'{"ids": 3}'),
    ],
)
def test_what_is_not_as_it_was_written_is_made_again(file: str, content: bytes, tmp_path: Path) -> None:
    maker = Maker()
    maker.files(tmp_path).get("a", maker.make)
    (tmp_path / "a" / file).write_bytes(content)
    for _ in range(2):
        assert_made(maker.files(tmp_path).get("a", maker.make))
    assert maker.num_made == 2


def test_others_are_removed_unless_they_are_used(tmp_path: Path) -> None:
    maker = Maker()
    files = maker.files(tmp_path)
    used = files.get("a", maker.make)
    files.get("b", maker.make)
    assert names(tmp_path) == {"a", "b"}
    assert_made(used)
    del used
    files.get("c", maker.make)
    assert names(tmp_path) == {"c"}


def test_a_place_that_cannot_be_written_is_told_and_memory_serves(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    maker = Maker()
    assert_made(maker.files(tmp_path / "file" / "tokens").get("a", maker.make))
    (note,) = maker.notes
    assert note.startswith("every rank makes its own tokens, in memory, as none are kept in ")
    assert note.endswith(": Not a directory")


def test_a_full_disk_is_told_and_memory_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, *_: object) -> None:
        (folder / "ids").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(token_files, "_write", fail)
    maker = Maker()
    assert_made(maker.files(tmp_path).get("a", maker.make))
    assert maker.notes[-1].endswith("No space left on device")
    assert names(tmp_path) == set()
    monkeypatch.undo()
    assert_made(maker.files(tmp_path).get("a", maker.make))
    assert names(tmp_path) == {"a"}, "who comes later tries again"


def test_a_disk_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    maker = Maker()
    for digest in ("a", "b", "a", "b"):
        assert_made(maker.files(tmp_path).get(digest, maker.make))
    assert maker.num_made == 2


@dataclass(frozen=True, slots=True)
class Dataset:
    """A Hugging Face dataset; without files it is in memory."""

    cache_files: tuple[dict[str, str], ...] = ()

    def __iter__(self) -> Iterator[dict[str, object]]:
        yield {"text": "seen " * 200}


def open_dataset(dataset: Dataset, patch: pytest.MonkeyPatch) -> Rows:
    patch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: dataset))
    return open_rows("hf:name")


def test_datasets_are_known_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.arrow").write_text("some")
    assert open_dataset(Dataset(), monkeypatch).trace() is None
    files = ({"filename": str(tmp_path / "a.arrow")},)
    assert open_dataset(Dataset(files), monkeypatch).trace() is not None


def test_another_digest_whenever_other_tokens_may_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "a.txt", tmp_path / "tokenizer"
    source.write_text("One.\n\nTwo.\n")
    tokenizer = train_tokenizer(["One. Two."], vocab_size=300, encloses=True)
    tokenizer.save_pretrained(folder)

    def digest(task: str = "causal-lm", **data: object) -> str | None:
        spec = job_of(task, source=str(source), **data).data
        assert spec is not None
        rows = open_rows(str(source))
        return Recipe(spec=spec, tokenizer=tokenizer, rows=rows, held_out=rows).digest(folder)

    before = digest()
    assert digest() == before
    assert digest(sequence_length=32) == before
    padded = {digest("masked-lm"), digest("masked-lm", sequence_length=32)}
    found = {before, *padded, digest(text_column="body"), digest(validation_share=0.1)}
    os.utime(source, ns=(1, 1))
    found.add(digest())
    source.write_text("One.\n\nThree.\n")
    os.utime(source, ns=(1, 1))
    found.add(digest())
    (folder / "tokenizer.json").write_text("{}")
    found.add(digest())
    assert len(found) == 8
    spec = job_of("causal-lm").data
    assert spec is not None
    recipe = Recipe(spec=spec, tokenizer=tokenizer, rows=open_rows(str(source)), held_out=None)
    assert replace(recipe, held_out=open_dataset(Dataset(), monkeypatch)).digest(folder) is None
