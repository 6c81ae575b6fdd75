"""What is wrong in a job, and where: the form that every check of the job room speaks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.errors import Problem
from isthmus.units import closest

Tables = Mapping[str, object]
Place = tuple[str | int, ...]


class FieldError(ValueError):
    """A value that cannot be used: what is wrong with it, and the cure."""

    def __init__(self, what: str, *, cure: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.cure = cure


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing wrong at one place of the job's tables."""

    place: Place
    what: str
    cure: str | None = None

    def as_problem(self, tables: Tables) -> Problem:
        """Return it with the place written as a user would."""
        return Problem(key=describe_place(self.place, tables), what=self.what, cure=self.cure)


def describe_place(place: Place, tables: Tables) -> str:
    """Return `cloud "west": ranks` for ("cloud", 1, "ranks"); `cloud[1]: ranks` where it has no name."""
    match place:
        case (str(section), int(index), *keys):
            entry = _describe_entry(section, index, tables)
            return f"{entry}: {_dotted(keys)}" if keys else entry
    return _dotted(place)


def entries(tables: Tables, section: str) -> list[Tables]:
    """Return the tables of `[[section]]`, with an empty one for each entry that is no table."""
    found = tables.get(section)
    if not isinstance(found, list):
        return []
    return [entry if isinstance(entry, dict) else {} for entry in found]


def link_pair(entry: Tables) -> tuple[str, str] | None:
    """Return the two cloud names of a link's table, or None where they cannot be read."""
    match entry.get("between"):
        case [str(first), str(second)]:
            return first, second
    return None


def entry_name(section: str, entry: Tables) -> str | None:
    """Return what users call an entry: a cloud by its name, a link as east-west."""
    if section == "link":
        pair = link_pair(entry)
        return "-".join(pair) if pair else None
    name = entry.get("name")
    return name if isinstance(name, str) else None


def _describe_entry(section: str, index: int, tables: Tables) -> str:
    found = entries(tables, section)
    name = entry_name(section, found[index]) if index < len(found) else None
    return f'{section} "{name}"' if name else f"{section}[{index}]"


def _dotted(keys: Sequence[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def plain_name(name: str) -> str:
    """A device's name without what people spell differently: `H-100` is `h100`."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the cure for a word that is not among the known ones."""
    choices = list(known)
    if not choices:
        return "there is nothing to choose from"
    meant = closest(word, choices)
    return f"did you mean {meant!r}?" if meant else f"choose from {', '.join(choices)}"


def show_value(value: object) -> str:
    """Return a value as the file writes it, or the kind of thing it is where that is long."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return repr(value)
        case dict():
            return "a table"
        case list() | tuple():
            return "a list"
    return str(value)
