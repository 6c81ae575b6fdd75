"""Short tales for language models.

What is learnt comes at several scales: spelling, phrases, names that recur, days that follow each other,
sums that are right, and an ending that takes up the beginning.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from isthmus.corpora.draws import Draws
from isthmus.corpora.words import ANIMALS, DAYS, GOODS, MEN, MONTHS, TOWNS, TRADES, WOMEN, in_words

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
