"""Rows from files, from the hub and from the package, and the split of them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.train.data.rows import Rows, is_held_out, open_rows, split_rows


def test_a_text_file_has_a_row_for_each_paragraph(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\none\ntwo\n\n \nthree")
    assert list(open_rows(str(tmp_path / "a.txt"))) == [{"text": "one\ntwo"}, {"text": "three"}]


def test_files_are_read_in_the_order_of_their_names_any_number_of_times(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name, "label": 1}) + "\n\n")
    rows = open_rows(str(tmp_path / "*.jsonl"))
    assert [row["text"] for row in rows] == ["a", "b"]
    assert list(rows) == list(rows)


def test_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    arrow: Any = __import__("pyarrow.parquet")
    rows = [{"text": "one", "label": 0}, {"text": "two", "label": 1}]
    arrow.parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(open_rows(str(tmp_path / "*.parquet"))) == rows


def test_built_in() -> None:
    assert len(list(open_rows("builtin:messages"))) == 3000


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"text": "one"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(open_rows("hf:owner/name")) == [{"text": "one"}]
    open_rows("hf:owner/name:config#validation[:10%]")
    assert asked == [("owner/name", None, "train"), ("owner/name", "config", "validation[:10%]")]


def test_a_dataset_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, _config: str | None, *, split: str) -> None:
        raise ValueError(f"no {split} of {name}\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"'x#y' cannot be loaded: no y of x$"):
        open_rows("hf:x#y")


@pytest.mark.parametrize(("module", "source"), [("datasets", "hf:x"), ("pyarrow", "{}/a.parquet")])
def test_a_package_that_is_missing(
    module: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(UserError, match=f"needs the package '{module}'") as caught:
        list(open_rows(source.format(tmp_path)))
    assert caught.value.hint == "in the clone of isthmus: pip install '.[datasets]'"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 of .*a.jsonl is no JSON object"),
        ("a.jsonl", b'["text"]\n', "line 1 of .*a.jsonl is no JSON object"),
        ("a.txt", b"\xff\xfe\x00", "a.txt is not in UTF-8"),
        ("a.csv", b"text\nx\n", "a.csv is of no known kind"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(open_rows(str(tmp_path / name)))
    assert caught.value.hint


def test_no_file_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file is found"):
        open_rows(str(tmp_path / "*.txt"))


def test_a_mistyped_corpus() -> None:
    with pytest.raises(UserError, match="no built-in corpus 'tails'") as caught:
        open_rows("builtin:tails")
    assert caught.value.hint == "did you mean 'tales'?"


@settings(deadline=None)
@given(num_blocks=st.integers(0, 20), every=st.integers(2, 30), num_more=st.integers(0, 29))
def test_one_row_of_each_block_is_held_out(num_blocks: int, every: int, num_more: int) -> None:
    rows = [{"number": number} for number in range(num_blocks * every + num_more % every)]
    kept, held_out = map(list, split_rows(Rows(lambda: rows, lambda: None), every=every))
    assert sorted([*kept, *held_out], key=lambda row: str(row["number"]).zfill(9)) == rows
    assert num_blocks <= len(held_out) <= num_blocks + 1


def test_rows_are_not_held_out_at_a_regular_distance() -> None:
    assert len({number % 20 for number in range(2000) if is_held_out(number, 20)}) > 10
