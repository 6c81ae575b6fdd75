"""Data sets that ship with the package: written by grammars from a fixed seed, the same on every machine."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from isthmus.corpora.messages import messages
from isthmus.corpora.people import names, questions
from isthmus.corpora.tales import tales

CORPORA: Final[Mapping[str, Callable[[], Iterator[dict[str, object]]]]] = MappingProxyType(
    {"tales": tales, "messages": messages, "names": names, "questions": questions}
)
"""The rows of each data set by its name."""
