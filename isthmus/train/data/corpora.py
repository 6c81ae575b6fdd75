"""Built-in data sets, written by grammars from a fixed seed, so that they are the same on every machine.

The words and sentences are in `corpora.toml`; the random numbers come from a hash of the row's name.
"""

import hashlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

T = TypeVar("T")

_NUM_TALES: Final = 300
_NUM_MESSAGES: Final = 3000
_NUM_ROWS: Final = 2000
_NUM_SCENES: Final = 4
_TAGS: Final = {"person": "PERSON", "town": "PLACE", "goods": "GOODS"}
_GRAMMAR: Final[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_WORDS: Final[Mapping[str, list[str]]] = _GRAMMAR["words"]
_TOWNS: Final = [start + end for start in _WORDS["town_starts"] for end in _WORDS["town_ends"]]
_PEOPLE: Final = _WORDS["women"] + _WORDS["men"]
DAYS: Final = tuple(_WORDS["days"])


class Draws:
    """Random numbers that depend only on the name of the stream."""

    def __init__(self, name: str) -> None:
        self._key = hashlib.blake2b(name.encode()).digest()
        self._num_drawn = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit - 1; the bias of the remainder is far below one in a billion."""
        self._num_drawn += 1
        drawn = hashlib.blake2b(self._num_drawn.to_bytes(8), key=self._key, digest_size=8)
        return int.from_bytes(drawn.digest()) % limit

    def between(self, least: int, most: int) -> int:
        return least + self.below(most - least + 1)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def several(self, options: Sequence[T], count: int) -> list[T]:
        """Some of the options, each at most once."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def in_words(number: int) -> str:
    """A number below one hundred as English writes it."""
    small, tens = _WORDS["below_twenty"], _WORDS["tens"]
    if number < len(small):
        return small[number]
    ten, one = divmod(number, 10)
    return f"{tens[ten]}-{small[one]}" if one else tens[ten]


def tales() -> Iterator[dict[str, object]]:
    """Some three hundred tales, about 300 kB of text, one a row."""
    for number in range(_NUM_TALES):
        yield {"text": _tale(Draws(f"tale {number}"))}


def _tale(draws: Draws) -> str:
    cast, first_day = _cast(draws)
    title = _passage(draws, _GRAMMAR["title"], cast)
    scenes = draws.several(_GRAMMAR["scenes"], _NUM_SCENES)
    # Each passage happens a day after the one before it; the beginning is drawn after the scenes.
    passages = [*enumerate(scenes, 1), (0, _GRAMMAR["beginning"]), (_NUM_SCENES + 1, _GRAMMAR["ending"])]
    told = {
        number: _passage(draws, passage, {**cast, "day": DAYS[(first_day + number) % 7]})
        for number, passage in passages
    }
    return "\n\n".join([title, *(told[number] for number in sorted(told))])


def _cast(draws: Draws) -> tuple[dict[str, str], int]:
    """The names and pronouns that recur in all scenes of a tale, and the weekday on which it begins."""
    own, other, she, her = (
        ("women", "men", "she", "her") if draws.below(2) == 0 else ("men", "women", "he", "his")
    )
    hero, friend = draws.several(_WORDS[own], 2)
    if draws.below(2):
        friend = draws.pick(_WORDS[other])
    town, other_town = draws.several(_TOWNS, 2)
    cast = {"hero": hero, "friend": friend, "town": town, "other_town": other_town}
    cast |= {"she": she, "She": she.capitalize(), "her": her}
    cast |= {"trade": draws.pick(_WORDS["trades"]), "animal": draws.pick(_WORDS["animals"])}
    virtue, moral = draws.pick(list(_GRAMMAR["morals"].items()))
    cast |= {"virtue": virtue, "moral": moral}
    cast |= {"lost": draws.pick(_WORDS["lost"]), "hidden": draws.pick(_WORDS["hidden"])}
    return cast, draws.below(7)


def _passage(draws: Draws, passage: Mapping[str, Any], cast: Mapping[str, str]) -> str:
    """A text with what is drawn for it; what is drawn may itself name other words."""
    words = dict(cast)
    numbers: dict[str, int] = {}
    for drawn, options in passage["draws"]:
        match options:
            case [int(least), int(most)]:
                numbers[drawn] = draws.between(least, most)
            case _:
                known = _WORDS[options] if isinstance(options, str) else options
                names = drawn.split()
                words |= zip(names, draws.several(known, len(names)), strict=True)
    if len(numbers) == 2:
        first, second = numbers.values()
        numbers |= {"sum": first + second, "rest": first - second}
    words |= {name: in_words(number) for name, number in numbers.items()}
    told: str = passage["text"]
    while "{" in told:
        told = told.format(**words)
    return told[0].upper() + told[1:]


def messages() -> Iterator[dict[str, object]]:
    """Three thousand messages in rows of `text` and `label`, the labels in equal shares."""
    offices = tuple(_GRAMMAR["offices"])
    for number in range(_NUM_MESSAGES):
        office = offices[number % len(offices)]
        yield {"text": _message(Draws(f"message {number}"), _GRAMMAR["offices"][office]), "label": office}


def _message(draws: Draws, office: Mapping[str, list[str]]) -> str:
    thing = draws.pick(office["things"])
    words = {
        "thing": thing,
        "Thing": thing[0].upper() + thing[1:],
        "trouble": draws.pick(office["troubles"]),
        "town": draws.pick(_TOWNS),
        "day": draws.pick(DAYS),
        "name": draws.pick(_PEOPLE),
    }
    known = _GRAMMAR["messages"]
    sentences = [draws.pick(known["frames"]), *draws.several(known["asides"], draws.below(3))]
    return " ".join(sentence.format(**words) for sentence in sentences)


def names() -> Iterator[dict[str, object]]:
    """Two thousand rows of `tokens` and their `tags`: PERSON, PLACE, GOODS or O."""
    for number in range(_NUM_ROWS):
        draws = Draws(f"names {number}")
        tagged = [
            pair for values in _values(draws, 2) for pair in _tagged(draws.pick(_GRAMMAR["facts"]), values)
        ]
        yield {"tokens": [word for word, _ in tagged], "tags": [tag for _, tag in tagged]}


def questions() -> Iterator[dict[str, object]]:
    """Two thousand rows of `context`, `question` and `answers`, laid out as SQuAD's."""
    for number in range(_NUM_ROWS):
        draws = Draws(f"questions {number}")
        facts = [(draws.pick(_GRAMMAR["facts"]), values) for values in _values(draws, 4)]
        sentences = [fact["sentence"].format(**values).replace(" .", ".") for fact, values in facts]
        asked = draws.below(len(facts))
        fact, values = facts[asked]
        answer = values[fact["answer"]]
        start = sum(len(sentence) + 1 for sentence in sentences[:asked]) + sentences[asked].index(answer)
        yield {
            "context": " ".join(sentences),
            "question": fact["question"].format(**values),
            "answers": {"text": [answer], "answer_start": [start]},
        }


def _values(draws: Draws, count: int) -> list[dict[str, str]]:
    """The words of some facts, no person or town in two of them, so that a question has one answer."""
    people, towns = draws.several(_PEOPLE, count), draws.several(_TOWNS, count)
    return [
        {
            "person": person,
            "town": town,
            "goods": draws.pick(_WORDS["goods"]),
            "trade": draws.pick(_WORDS["trades"]),
            "count": in_words(draws.between(2, 99)),
        }
        for person, town in zip(people, towns, strict=True)
    ]


def _tagged(fact: Mapping[str, str], values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for piece in fact["sentence"].split():
        name = piece.strip("{}")
        is_value = piece.startswith("{")
        for word in values[name].split() if is_value else [piece]:
            yield word, _TAGS.get(name, "O") if is_value else "O"


CORPORA: Final[Mapping[str, Callable[[], Iterator[dict[str, object]]]]] = MappingProxyType(
    {"tales": tales, "messages": messages, "names": names, "questions": questions}
)
"""The rows of each data set by its name."""
