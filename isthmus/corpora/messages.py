"""Short messages to a town hall, each labelled with the office that it is for."""

from collections.abc import Iterator, Mapping
from typing import Final

from isthmus.corpora.draws import Draws
from isthmus.corpora.words import DAYS, MEN, TOWNS, WOMEN

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
