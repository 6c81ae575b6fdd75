"""The built-in corpora: the same everywhere, and what they tell is true."""

import hashlib
import json
import re
from collections import Counter

import pytest

from isthmus.train.data.corpora import CORPORA, DAYS, in_words, tales

NUMBERS = {in_words(number): number for number in range(100)}


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("tales", "15ae44b6bd853024"),
        ("messages", "b65ecb8a5885d878"),
        ("names", "39035804f9a74dd6"),
        ("questions", "94cf23be93e9aa6c"),
    ],
)
def test_a_corpus_never_changes(name: str, digest: str) -> None:
    text = "\n".join(json.dumps(row) for row in CORPORA[name]())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_tales_are_a_small_corpus() -> None:
    texts = [str(row["text"]) for row in tales()]
    assert len(set(texts)) == len(texts)
    assert 100_000 < sum(map(len, texts)) < 300_000
    assert not [text for text in texts if re.search(r"[{}]|\ba [aeiou]", text)]


def test_sums_in_tales_are_right() -> None:
    text = " ".join(str(row["text"]) for row in tales())
    bought = re.findall(
        r"bought ([\w-]+) [\w ]+ from one stall and ([\w-]+) [\w ]+ another, ([\w-]+) th", text
    )
    assert len(bought) > 50
    assert all(NUMBERS[first] + NUMBERS[second] == NUMBERS[total] for first, second, total in bought)
    walked = re.findall(r"It is ([\w-]+) miles .* walked ([\w-]+) of them, so that ([\w-]+) were", text)
    assert all(NUMBERS[first] - NUMBERS[second] == NUMBERS[left] for first, second, left in walked)


def test_days_in_tales_follow_each_other() -> None:
    for row in tales():
        days = [DAYS.index(day) for day in re.findall("|".join(DAYS), str(row["text"]))]
        assert days == [(days[0] + number) % 7 for number in range(len(days))]


def test_messages_have_labels_in_equal_shares() -> None:
    counts = Counter(str(row["label"]) for row in CORPORA["messages"]())
    assert len(counts) == 6
    assert set(counts.values()) == {500}


def test_every_word_of_names_has_a_tag() -> None:
    for row in CORPORA["names"]():
        tokens, tags = row["tokens"], row["tags"]
        assert isinstance(tokens, list)
        assert isinstance(tags, list)
        assert len(tokens) == len(tags)
        assert {"PERSON", "PLACE"} <= set(tags)


def test_every_question_has_one_answer_in_its_context() -> None:
    for row in CORPORA["questions"]():
        match row:
            case {"context": str(context), "answers": {"text": [str(text)], "answer_start": [int(start)]}}:
                assert context[start : start + len(text)] == text
            case _:
                pytest.fail(f"{row} is not laid out as SQuAD's rows")
