"""The words that the grammars share: people, places, goods, days and numbers."""

from typing import Final

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
