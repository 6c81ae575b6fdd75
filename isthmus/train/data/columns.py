"""What a row holds for its task, or an error that names the column."""

from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.errors import UserError
from isthmus.job import DataSpec
from isthmus.train.data.corpus import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where a context answers its question, in characters; an empty span where it does not."""

    question: str
    context: str
    start: int
    end: int


def text_column(spec: DataSpec) -> str:
    """The column of the text, or of the words."""
    return spec.text_column or ("tokens" if spec.task == "token-classification" else "text")


def label_column(spec: DataSpec) -> str:
    """The column of the label, or of the words' tags."""
    return spec.label_column or ("tags" if spec.task == "token-classification" else "label")


def read_texts(row: Row, spec: DataSpec) -> tuple[str, ...]:
    """All text of a row, whatever its task: what a tokenizer is trained on."""
    match spec.task:
        case "question-answering":
            return read_text(row, "question"), read_text(row, "context")
        case "token-classification":
            return (" ".join(read_words(row, text_column(spec))),)
    columns = (text_column(spec), *([spec.pair_column] if spec.pair_column else []))
    return tuple(read_text(row, column) for column in columns)


def read_text(row: Row, column: str) -> str:
    """The text in a column."""
    value = _value(row, column)
    if not isinstance(value, str):
        raise _misfit(row, column, "text")
    return value


def read_words(row: Row, column: str) -> list[str]:
    """The words in a column."""
    value = _value(row, column)
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _misfit(row, column, "a list of words")
    return value


def read_label(row: Row, column: str) -> int | str:
    """The label in a column."""
    value = _value(row, column)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _misfit(row, column, "a whole number or a name")
    return value


def read_tags(row: Row, column: str, *, count: int) -> list[int | str]:
    """The tags in a column, one for each word."""
    value = _value(row, column)
    if not isinstance(value, list) or len(value) != count:
        raise _misfit(row, column, f"a list of {count} tags, one for each word")
    return [read_label({column: tag}, column) for tag in value]


def read_answer(row: Row) -> Answer:
    """The question, its context, and the first of the answers."""
    question, context = read_text(row, "question"), read_text(row, "context")
    match _value(row, "answers"):
        case {"text": [], "answer_start": []}:
            return Answer(question=question, context=context, start=0, end=0)
        case {"text": [str(text), *_], "answer_start": [int(start), *_]} if context.startswith(text, start):
            return Answer(question=question, context=context, start=start, end=start + len(text))
    raise _misfit(
        row, "answers", 'as {"text": ["..."], "answer_start": [0]}, where the context has that text'
    )


def _value(row: Row, column: str) -> object:
    if column not in row:
        raise UserError(
            f"a row of the data has no {column!r}",
            hint=f"its columns are {', '.join(map(repr, row)) or 'none'}: name the right one in [data]",
        )
    return row[column]


def _misfit(row: Row, column: str, wanted: str) -> UserError:
    shown = repr(row[column])
    short = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return UserError(
        f"{column!r} of a row is {short}",
        hint=f"it must be {wanted}: correct the data, or name another column in [data]",
    )


@dataclass(frozen=True, slots=True)
class Labels:
    """The names of the classes, in the order of their numbers."""

    names: tuple[str, ...]

    def number(self, label: int | str) -> int:
        """The number of a label's class."""
        if isinstance(label, int) and 0 <= label < len(self.names):
            return label
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        raise UserError(
            f"the label {label!r} is not among those of the training data",
            hint=f"they are {', '.join(self.names)}",
        )


def collect_labels(labels: Iterable[int | str]) -> Labels:
    """The classes of the labels that occur: names in the order of the alphabet, numbers up to the highest."""
    found = set(labels)
    numbers = {label for label in found if isinstance(label, int)}
    if numbers and (numbers != found or min(numbers) < 0):
        raise UserError(
            "the labels are neither all names nor all numbers from 0 on",
            hint="use names, or numbers that count the classes from 0",
        )
    if numbers:
        return Labels(tuple(map(str, range(max(numbers) + 1))))
    return Labels(tuple(sorted(map(str, found))))
