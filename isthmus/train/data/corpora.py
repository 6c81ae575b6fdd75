"""Built-in data sets: written by grammars from a fixed seed, so that they are the same on every machine."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar

T = TypeVar("T")


class Draws:
    """A stream of draws that depends on its name alone."""

    def __init__(self, name: str) -> None:
        self._key = hashlib.blake2b(name.encode()).digest()
        self._num_drawn = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit - 1; the bias of the remainder is far below one in a billion."""
        self._num_drawn += 1
        drawn = hashlib.blake2b(self._num_drawn.to_bytes(8), key=self._key, digest_size=8)
        return int.from_bytes(drawn.digest()) % limit

    def between(self, least: int, most: int) -> int:
        """A whole number from least to most."""
        return least + self.below(most - least + 1)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def several(self, options: Sequence[T], count: int) -> list[T]:
        """Some of the options, each at most once."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]


WOMEN: Final = (
    "Ada", "Brida", "Celia", "Dorle", "Edda", "Fenna", "Greta", "Hilde", "Imke", "Jorun", "Karla", "Lida",
    "Mirel", "Nora", "Odile", "Petra", "Runa", "Silka", "Tilda", "Ursel",
)  # fmt: skip
MEN: Final = (
    "Anton", "Bertil", "Casper", "Detlef", "Emil", "Falko", "Gregor", "Henrik", "Ivo", "Jakob", "Konrad",
    "Linus", "Matthis", "Niels", "Oskar", "Pavel", "Ruben", "Stellan", "Tomas", "Volker",
)  # fmt: skip
TOWNS: Final = tuple(
    first + second
    for first in (
        "Amber",
        "Birch",
        "Cold",
        "Dun",
        "East",
        "Fern",
        "Gray",
        "Iron",
        "Low",
        "Mill",
        "North",
        "Oak",
    )
    for second in (
        "bridge",
        "brook",
        "fell",
        "ford",
        "gate",
        "haven",
        "holm",
        "marsh",
        "mere",
        "moor",
        "wick",
    )
)
TRADES: Final = (
    "baker", "weaver", "miller", "potter", "carpenter", "fisher", "shepherd", "clockmaker", "gardener",
    "blacksmith", "ferryman", "beekeeper", "schoolteacher", "mason", "tailor", "bookbinder",
)  # fmt: skip
ANIMALS: Final = ("goat", "raven", "donkey", "hare", "fox", "cat", "heron", "badger", "terrier", "hedgehog")
GOODS: Final = (
    "apples", "candles", "eggs", "fish hooks", "jars of honey", "lanterns", "loaves", "nails", "onions",
    "pears", "ribbons", "ropes", "spoons", "turnips", "walnuts", "wooden bowls",
)  # fmt: skip
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip

_SMALL: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS: Final = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number below one hundred as English writes it."""
    if number < len(_SMALL):
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens]}-{_SMALL[ones]}" if ones else _TENS[tens]


_NUM_TALES: Final = 300

_VIRTUES: Final = {
    "patient": "What is done slowly is done once.",
    "honest": "A true word weighs more than a full purse.",
    "brave": "The door opens to the one who knocks.",
    "generous": "Half a loaf shared is a whole one.",
    "curious": "Who asks the way is lost only once.",
    "stubborn": "A stone that stays becomes a wall.",
}
_LOST: Final = ("ring", "key", "letter", "silver thimble", "map", "red scarf", "flute", "pocket watch")
_HIDDEN: Final = (
    "under the stairs", "behind the mill", "in the hollow oak", "at the bottom of the well",
    "between two stones of the bridge", "in the nest of a magpie", "beneath the church bell",
)  # fmt: skip
_WEATHER: Final = (
    ("rain", "The rain fell on the roofs of {town} as if it had been paid by the hour."),
    ("snow", "Snow lay on the fields, and the road to {town} was one long white page."),
    ("fog", "Fog came up from the river until {town} was nothing but voices."),
    ("wind", "The wind went through {town} and tried every door."),
    ("sun", "The sun stood over {town}, and even the cats looked for shade."),
)
_GREETINGS: Final = ("Good morning", "Good evening", "Well met", "Peace to this house")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cast:
    """Who a tale is about; names and pronouns recur in all its scenes."""

    hero: str
    she: str
    her: str
    trade: str
    friend: str
    animal: str
    town: str
    other_town: str
    virtue: str
    lost: str
    hidden: str
    day: int

    def tell(self, text: str, **more: object) -> str:
        """Put the cast into a sentence."""
        told = text.format(
            hero=self.hero,
            she=self.she,
            She=self.she.capitalize(),
            her=self.her,
            trade=self.trade,
            friend=self.friend,
            animal=self.animal,
            town=self.town,
            other_town=self.other_town,
            virtue=self.virtue,
            lost=self.lost,
            hidden=self.hidden,
            **more,
        )
        return told[0].upper() + told[1:]


def tales() -> Iterator[dict[str, object]]:
    """Some three hundred tales, about 300 kB of text, one a row."""
    for number in range(_NUM_TALES):
        yield {"text": _tale(Draws(f"tale {number}"))}


def _tale(draws: Draws) -> str:
    cast = _cast(draws)
    title = cast.tell(draws.pick(("{hero} and the {animal}", "The {trade} of {town}", "The lost {lost}")))
    scenes = draws.several(_SCENES, 4)
    told = [scene(draws, cast, number) for number, scene in enumerate(scenes)]
    return "\n\n".join([title, _beginning(draws, cast), *told, _ending(draws, cast, len(scenes))])


def _cast(draws: Draws) -> _Cast:
    is_woman = draws.below(2) == 0
    hero, friend = draws.several(WOMEN if is_woman else MEN, 2)
    if draws.below(2):
        friend = draws.pick(MEN if is_woman else WOMEN)
    town, other_town = draws.several(TOWNS, 2)
    return _Cast(
        hero=hero,
        she="she" if is_woman else "he",
        her="her" if is_woman else "his",
        trade=draws.pick(TRADES),
        friend=friend,
        animal=draws.pick(ANIMALS),
        town=town,
        other_town=other_town,
        virtue=draws.pick(tuple(_VIRTUES)),
        lost=draws.pick(_LOST),
        hidden=draws.pick(_HIDDEN),
        day=draws.below(7),
    )


def _beginning(draws: Draws, cast: _Cast) -> str:
    opening = draws.pick(
        (
            "Once there was a {trade} in {town} whose name was {hero}.",
            "In {town}, where the road to {other_town} begins, lived a {trade} called {hero}.",
            "{hero} was the only {trade} of {town}, and the most {virtue}.",
        )
    )
    date = f"{draws.pick(MONTHS)} {draws.between(1, 28)}"
    loss = draws.pick(
        (
            "On {day}, {date}, {she} found that {her} {lost} was gone.",
            "Then, on the morning of {day}, {date}, {her} {lost} was no longer in its place.",
        )
    )
    return f"{cast.tell(opening)} {cast.tell(loss, day=DAYS[cast.day], date=date)}"


def _market(draws: Draws, cast: _Cast, number: int) -> str:
    first, second = draws.several(GOODS, 2)
    many, more = draws.between(2, 12), draws.between(2, 12)
    asked = draws.pick(("nobody there had seen the {lost}.", "at every stall {she} asked for the {lost}."))
    return cast.tell(
        "On {day} {hero} went to the market. {She} bought {many} {first} from one stall and {more} {second} "
        "from another, {total} things in all, and " + asked,
        day=_day(cast, number),
        many=in_words(many),
        first=first,
        more=in_words(more),
        second=second,
        total=in_words(many + more),
    )


def _debt(draws: Draws, cast: _Cast, number: int) -> str:
    had, gave = draws.between(20, 60), draws.between(3, 19)
    return cast.tell(
        "On {day} {friend} came to the door. “{greeting}, {hero},” said {friend}, “I owe you {gave} coins.” "
        "{hero} had {had} coins in the box; now there were {sum}.",
        day=_day(cast, number),
        greeting=draws.pick(_GREETINGS),
        gave=in_words(gave),
        had=in_words(had),
        sum=in_words(had + gave),
    )


def _weather(draws: Draws, cast: _Cast, number: int) -> str:
    name, sight = draws.pick(_WEATHER)
    work = draws.pick(("mended the roof", "swept the floor", "wrote to {friend}", "fed the {animal}"))
    return cast.tell(
        f"{sight} On {{day}} {{hero}} stayed at home because of the {name} and {work}.",
        day=_day(cast, number),
    )


def _animal(draws: Draws, cast: _Cast, number: int) -> str:
    answer = draws.pick(
        (
            "“I have seen it,” said the {animal}, “but I will not say where.”",
            "“Look where nobody looks,” said the {animal}.",
            "“Ask me again tomorrow,” said the {animal}, and went away.",
        )
    )
    return cast.tell(
        "On {day} {hero} met a {animal} by the road. “Have you seen my {lost}?” asked {hero}. " + answer,
        day=_day(cast, number),
    )


def _journey(draws: Draws, cast: _Cast, number: int) -> str:
    miles, walked = draws.between(12, 40), draws.between(2, 11)
    return cast.tell(
        "It is {miles} miles from {town} to {other_town}. On {day} {hero} and {friend} walked {walked} of "
        "them, so that {left} were left, and slept in a barn.",
        day=_day(cast, number),
        miles=in_words(miles),
        walked=in_words(walked),
        left=in_words(miles - walked),
    )


def _advice(draws: Draws, cast: _Cast, number: int) -> str:
    saying = draws.pick(
        (
            "“Be {virtue},” {friend} said, “and it will come back to you.”",
            "“In {other_town} they say that a {trade} must be {virtue},” {friend} said.",
            "“You were always {virtue},” said {friend}, “so do not stop now.”",
        )
    )
    return cast.tell("On {day} {hero} told {friend} about the {lost}. " + saying, day=_day(cast, number))


def _ending(draws: Draws, cast: _Cast, num_scenes: int) -> str:
    finding = draws.pick(
        (
            "At last, on {day}, the {lost} was found {hidden}.",
            "And on {day} {hero} looked {hidden}, and there lay the {lost}.",
            "On {day} the {animal} brought {hero} to the {lost}: it had been {hidden} all the time.",
        )
    )
    close = draws.pick(
        ("{hero} gave the {friend_or_animal} a supper.", "{hero} and {friend} laughed until midnight.")
    )
    shared = draws.pick((cast.animal, "whole town"))
    told = cast.tell(f"{finding} {close}", day=_day(cast, num_scenes), friend_or_animal=shared)
    return f"{told} {_VIRTUES[cast.virtue]}"


def _day(cast: _Cast, number: int) -> str:
    """Scenes follow each other day by day, the first on the morrow of the beginning."""
    return DAYS[(cast.day + 1 + number) % 7]


_SCENES: Final[tuple[Callable[[Draws, _Cast, int], str], ...]] = (
    _market,
    _debt,
    _weather,
    _animal,
    _journey,
    _advice,
)


_NUM_MESSAGES: Final = 3000

# Each office has things it looks after and what may be wrong with them; some words belong to several.
_OFFICES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "library": (
        ("the novel", "my reader's card", "the reading room", "the atlas", "the catalogue"),
        ("is overdue", "was closed early", "has a torn page", "cannot be renewed", "is on the wrong shelf"),
    ),
    "roads": (
        ("the bridge", "the crossing", "the street lamp", "the kerb", "the footpath"),
        ("has a deep hole", "is dark at night", "is covered with ice", "was blocked by a cart", "is cracked"),
    ),
    "water": (
        ("the tap", "the drain", "the fountain", "the water meter", "the cellar"),
        ("is leaking", "is flooded", "smells of iron", "runs dry", "is cracked"),
    ),
    "schools": (
        ("the lesson", "the school bus", "the class trip", "the report card", "the music teacher"),
        ("was late", "starts too early", "has too many pupils", "was cancelled", "is on the wrong list"),
    ),
    "markets": (
        ("my stall", "the scale", "the fish seller", "the stall fee", "the vegetable stand"),
        ("was moved without a word", "weighs too little", "is too expensive", "was cancelled", "has no room"),
    ),
    "gardens": (
        ("the old elm", "the rose bed", "the playground", "the hedge", "the lawn"),
        ("needs cutting", "lost a branch", "is overgrown", "was trampled", "is covered with leaves"),
    ),
}
_FRAMES: Final = (
    "{Thing} in {town} {trouble}.",
    "Since {day} {thing} {trouble}.",
    "Please look at it: {thing} {trouble}.",
    "My neighbour {name} says that {thing} {trouble}.",
    "Could somebody come on {day}? {Thing} {trouble}.",
)
_ASIDES: Final = (
    "I wrote about this on {day}.",
    "{name} can show you the place.",
    "I have lived in {town} for years.",
    "Thank you for your help.",
    "This is not urgent.",
)


def messages() -> Iterator[dict[str, object]]:
    """Three thousand messages in rows of `text` and `label`, the labels in equal shares."""
    offices = tuple(_OFFICES)
    for number in range(_NUM_MESSAGES):
        office = offices[number % len(offices)]
        yield {"text": _message(Draws(f"message {number}"), office), "label": office}


def _message(draws: Draws, office: str) -> str:
    things, troubles = _OFFICES[office]
    thing = draws.pick(things)
    words = {
        "thing": thing,
        "Thing": thing[0].upper() + thing[1:],
        "trouble": draws.pick(troubles),
        "town": draws.pick(TOWNS),
        "day": draws.pick(DAYS),
        "name": draws.pick(WOMEN + MEN),
    }
    sentences = [draws.pick(_FRAMES), *draws.several(_ASIDES, draws.below(3))]
    return " ".join(sentence.format(**words) for sentence in sentences)


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


CORPORA: Final[Mapping[str, Callable[[], Iterator[dict[str, object]]]]] = MappingProxyType(
    {"tales": tales, "messages": messages, "names": names, "questions": questions}
)
"""The rows of each data set by its name."""
