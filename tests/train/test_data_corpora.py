"""The built-in corpora are the same everywhere."""

import hashlib
import json
import re
from collections import Counter

import pytest

from isthmus.train.data.rows import open_rows


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("tales", "15ae44b6bd853024"),
        ("messages", "b65ecb8a5885d878"),
        ("names", "39035804f9a74dd6"),
        ("questions", "94cf23be93e9aa6c"),
        ("pairs", "57901f924b6c5446"),
    ],
)
def test_a_corpus_never_changes(name: str, digest: str) -> None:
    text = "\n".join(json.dumps(row) for row in open_rows(f"builtin:{name}"))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_tales_are_a_small_corpus() -> None:
    texts = [str(row["text"]) for row in open_rows("builtin:tales")]
    assert len(set(texts)) == len(texts)
    assert 100_000 < sum(map(len, texts)) < 300_000
    assert not [text for text in texts if re.search(r"[{}]|\ba [aeiou]", text)]


def test_messages_have_labels_in_equal_shares() -> None:
    counts = Counter(str(row["label"]) for row in open_rows("builtin:messages"))
    assert len(counts) == 6
    assert set(counts.values()) == {500}


def test_every_word_of_names_has_a_tag() -> None:
    for row in open_rows("builtin:names"):
        tokens, tags = row["tokens"], row["tags"]
        assert isinstance(tokens, list)
        assert isinstance(tags, list)
        assert len(tokens) == len(tags)
        assert {"PERSON", "PLACE"} <= set(tags)


def test_every_question_has_one_answer_in_its_context() -> None:
    for row in open_rows("builtin:questions"):
        match row:
            case {"context": str(context), "answers": {"text": [str(text)], "answer_start": [int(start)]}}:
                assert context[start : start + len(text)] == text
            case _:
                pytest.fail(f"{row} is not laid out as SQuAD's rows")
