"""Who lives where and does what: the same little facts as tagged words, and as questions with answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from isthmus.corpora.draws import Draws
from isthmus.corpora.words import GOODS, MEN, TOWNS, TRADES, WOMEN, in_words

_NUM_ROWS: Final = 2000
_PEOPLE: Final = WOMEN + MEN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fact:
    """A sentence whose marked spots have a tag, and a question that one of the spots answers."""

    sentence: str
    question: str
    answer: str


_FACTS: Final = (
    _Fact(sentence="{person} lives in {town} .", question="Where does {person} live?", answer="town"),
    _Fact(sentence="In {town} {person} sells {goods} .", question="What does {person} sell?", answer="goods"),
    _Fact(
        sentence="{person} works as a {trade} near {town} .",
        question="What is the trade of {person}?",
        answer="trade",
    ),
    _Fact(
        sentence="The road from {town} ends at the house of {person} .",
        question="Who lives at the end of the road from {town}?",
        answer="person",
    ),
    _Fact(
        sentence="{person} bought {count} {goods} in {town} .",
        question="How many {goods} did {person} buy?",
        answer="count",
    ),
)
_TAGS: Final = {"person": "PERSON", "town": "PLACE", "goods": "GOODS"}


def names() -> Iterator[dict[str, object]]:
    """Two thousand rows of `tokens` and their `tags`: PERSON, PLACE, GOODS or O."""
    for number in range(_NUM_ROWS):
        draws = Draws(f"names {number}")
        tagged = [pair for values in _several(draws, 2) for pair in _tagged(draws.pick(_FACTS), values)]
        yield {"tokens": [word for word, _ in tagged], "tags": [tag for _, tag in tagged]}


def questions() -> Iterator[dict[str, object]]:
    """Two thousand rows of `context`, `question` and `answers`, laid out as SQuAD's."""
    for number in range(_NUM_ROWS):
        draws = Draws(f"questions {number}")
        facts = [(draws.pick(_FACTS), values) for values in _several(draws, 4)]
        sentences = [_plain(fact.sentence.format(**values)) for fact, values in facts]
        asked = draws.below(len(facts))
        fact, values = facts[asked]
        answer = values[fact.answer]
        offset = sum(len(sentence) + 1 for sentence in sentences[:asked])
        start = offset + sentences[asked].index(answer)
        yield {
            "context": " ".join(sentences),
            "question": fact.question.format(**values),
            "answers": {"text": [answer], "answer_start": [start]},
        }


def _several(draws: Draws, count: int) -> list[dict[str, str]]:
    """The words of some facts, no person or town in two of them, so that a question has one answer."""
    people, towns = draws.several(_PEOPLE, count), draws.several(TOWNS, count)
    return [
        {
            "person": person,
            "town": town,
            "goods": draws.pick(GOODS),
            "trade": draws.pick(TRADES),
            "count": in_words(draws.between(2, 99)),
        }
        for person, town in zip(people, towns, strict=True)
    ]


def _tagged(fact: _Fact, values: dict[str, str]) -> Iterator[tuple[str, str]]:
    for piece in fact.sentence.split():
        spot = piece.strip("{}")
        tag = _TAGS.get(spot, "O") if piece.startswith("{") else "O"
        for word in values[spot].split() if piece.startswith("{") else [piece]:
            yield word, tag


def _plain(sentence: str) -> str:
    return sentence.replace(" .", ".")
