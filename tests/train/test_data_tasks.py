"""From rows to samples: packing, masking, classes, tags and answers."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.job import DataSpec
from isthmus.model.heads import HEADS, IGNORED
from isthmus.train.data.rows import Labels, Row, Rows, collect_labels, open_rows
from isthmus.train.data.samples import (
    LabelledSequence,
    MaskedSamples,
    PackedSamples,
    Pick,
    RaggedSamples,
    Recipe,
    has_tags,
    packed_tokens,
    padded_arrays,
)
from isthmus.train.data.token_files import in_memory
from isthmus.train.data.tokenizer import train_tokenizer
from isthmus.train.data.training_data import collate

LABELS = Labels(("no", "yes"))


def rows_of(*rows: dict[str, object]) -> Rows:
    return Rows(lambda: rows, lambda: None)


def make_samples(
    rows: Iterable[Row], tokenizer: Any, spec: DataSpec, labels: Labels
) -> list[LabelledSequence]:
    arrays = in_memory(padded_arrays(rows, tokenizer, spec, labels)).arrays
    samples = RaggedSamples(arrays=arrays, has_tags=has_tags(spec))
    return [samples.read(Pick(epoch=0, index=index)) for index in range(len(samples))]


def spec(task: str, length: int = 32, **values: object) -> DataSpec:
    return DataSpec.model_validate({"source": "x", "task": task, "sequence_length": length, **values})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = (str(row["context"]) for row in open_rows("builtin:questions"))
    return train_tokenizer(texts, vocab_size=400, encloses=True)


def test_tasks_of_the_job_are_the_heads_of_models() -> None:
    tasks = DataSpec.model_json_schema()["properties"]["task"]["enum"]
    assert set(tasks) == set(HEADS)


def test_documents_are_joined_by_the_end_token(tokenizer: Any) -> None:
    rows = [{"text": "Ada lives in Dunmoor."}, {"text": ""}, {"text": "Ivo"}]
    tokens = np.concatenate(list(packed_tokens(rows, tokenizer, spec("causal-lm", 4))))
    plain = [tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in rows]
    expected = [token for ids in plain for token in (*ids, 2)]
    assert tokens.tolist() == expected
    assert tokens.dtype == np.uint16


@settings(deadline=None)
@given(num_tokens=st.integers(0, 50), length=st.integers(1, 20))
def test_every_token_is_in_one_sequence(num_tokens: int, length: int) -> None:
    tokens = np.arange(num_tokens)
    for keeps_rest in (False, True):
        samples = PackedSamples(tokens=tokens, sequence_length=length, keeps_rest=keeps_rest)
        read = [samples.read(Pick(epoch=0, index=index)) for index in range(len(samples))]
        found = np.concatenate([np.empty(0, int), *(one.ids for one in read)]).tolist()
        assert found == list(range(len(found)))
        assert all(len(one.ids) == length or keeps_rest for one in read)
        assert num_tokens - len(found) < (2 if keeps_rest else length)


def masked(count: int, seed: int = 0) -> MaskedSamples:
    ids = np.concatenate([[1], np.arange(10, 10 + count), [2]])
    return MaskedSamples(
        samples=PackedSamples(tokens=ids, sequence_length=len(ids), keeps_rest=False),
        seed=seed,
        mask_id=3,
        special_ids=(0, 1, 2, 3),
        num_tokens=5000,
    )


def test_masking_has_its_shares() -> None:
    samples = masked(4000)
    plain, found = samples.samples.read(Pick(epoch=0, index=0)), samples.read(Pick(epoch=0, index=0))
    hidden = found.labels != IGNORED
    assert np.array_equal(found.labels[hidden], plain.ids[hidden])
    assert np.array_equal(found.ids[~hidden], plain.ids[~hidden])
    assert not hidden[[0, -1]].any()
    assert 0.13 < hidden.mean() < 0.17
    assert 0.75 < (found.ids[hidden] == 3).mean() < 0.85
    assert 0.05 < (found.ids[hidden] == plain.ids[hidden]).mean() < 0.15


def test_masking_depends_on_seed_and_epoch_alone() -> None:
    def labels(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(masked(100, seed).read(Pick(epoch=epoch, index=0)).labels.tolist())

    assert labels(0, 0) == labels(0, 0)
    assert len({labels(0, 0), labels(0, 1), labels(1, 0)}) == 3


@settings(deadline=None)
@given(count=st.integers(1, 8), seed=st.integers(0, 100))
def test_a_masked_sample_always_has_a_label(count: int, seed: int) -> None:
    found = masked(count, seed).read(Pick(epoch=0, index=0))
    assert (found.labels != IGNORED).any()


def test_a_text_of_special_tokens_alone_has_nothing_to_mask() -> None:
    assert (masked(0).read(Pick(epoch=0, index=0)).labels == IGNORED).all()


def test_long_texts_for_masking_are_cut_into_windows(tokenizer: Any) -> None:
    text = "Ada lives in Dunmoor. " * 20
    samples = list(make_samples([{"text": text}], tokenizer, spec("masked-lm", 16), LABELS))
    assert len(samples) > 5
    assert all(len(sample.ids) <= 16 and sample.ids[0] == 1 and sample.ids[-1] == 2 for sample in samples)
    inner = [token for sample in samples for token in sample.ids[1:-1].tolist()]
    assert tokenizer.decode(inner) == text


def test_classified_texts(tokenizer: Any) -> None:
    rows = [{"text": "Ada " * 100, "label": "yes"}, {"text": "Ivo", "label": "no"}]
    samples = list(make_samples(rows, tokenizer, spec("sequence-classification"), LABELS))
    assert [int(sample.labels) for sample in samples] == [1, 0]
    assert len(samples[0].ids) == 32
    assert tokenizer.decode(samples[1].ids) == "<bos>Ivo<eos>"


def test_classified_pairs(tokenizer: Any) -> None:
    job = spec("sequence-classification", text_column="a", pair_column="b", label_column="c")
    rows = [{"a": "Ivo", "b": "Ada", "c": "no"}]
    (sample,) = make_samples(rows, tokenizer, job, LABELS)
    assert tokenizer.decode(sample.ids) == "<bos>Ivo<eos>Ada<eos>"


def test_the_first_token_of_a_word_has_its_tag(tokenizer: Any) -> None:
    words = ["Xylophonist", "Ada", "of", "Graystone", "!?"]
    rows = [{"tokens": words, "tags": [0, 1, 0, 1, 0]}]
    (sample,) = make_samples(rows, tokenizer, spec("token-classification", 64), LABELS)
    tagged = [index for index, label in enumerate(sample.labels) if label != IGNORED]
    assert [int(sample.labels[index]) for index in tagged] == [0, 1, 0, 1, 0]
    assert len(sample.labels) == len(sample.ids) > len(words) + 2
    pieces = [
        tokenizer.decode(sample.ids[start:end]).strip()
        for start, end in zip(tagged, [*tagged[1:], -1], strict=True)
    ]
    assert pieces == words


def test_answers_are_where_their_tokens_say(tokenizer: Any) -> None:
    rows = list(open_rows("builtin:questions"))[:200]
    samples = list(make_samples(rows, tokenizer, spec("question-answering", 256), LABELS))
    assert len(samples) == len(rows)
    for row, sample in zip(rows, samples, strict=True):
        first, last = sample.labels
        answers: Any = row["answers"]
        assert tokenizer.decode(sample.ids[first : last + 1]).strip() == answers["text"][0]


def test_a_long_context_becomes_windows_of_which_some_have_the_answer(tokenizer: Any) -> None:
    context = "Ivo lives in Dunmoor. " * 30 + "Ada lives in Pinefell."
    answers = {"text": ["Pinefell"], "answer_start": [context.index("Pinefell")]}
    rows = [{"question": "Where does Ada live? " * 40, "context": context, "answers": answers}]
    samples = list(make_samples(rows, tokenizer, spec("question-answering", 64), LABELS))
    found = [sample for sample in samples if sample.labels.any()]
    assert 1 <= len(found) < len(samples)
    for sample in found:
        first, last = sample.labels
        assert tokenizer.decode(sample.ids[first : last + 1]).strip() == "Pinefell"


def test_a_question_without_an_answer(tokenizer: Any) -> None:
    rows = [{"question": "Who?", "context": "Nobody.", "answers": {"text": [], "answer_start": []}}]
    (sample,) = make_samples(rows, tokenizer, spec("question-answering"), LABELS)
    assert sample.labels.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("causal-lm", {"txet": "a"}, "a row of the data has no 'text'"),
        ("causal-lm", {"text": 7}, "'text' of a row is 7"),
        ("masked-lm", {"text": ["a"]}, "'text' of a row is"),
        ("sequence-classification", {"text": "a"}, "a row of the data has no 'label'"),
        ("sequence-classification", {"text": "a", "label": 0.5}, "'label' of a row is 0.5"),
        ("sequence-classification", {"text": "a", "label": "maybe"}, "the label 'maybe' is not among"),
        ("sequence-classification", {"text": "a", "label": 2}, "the label 2 is not among"),
        ("token-classification", {"tokens": "a b", "tags": [0, 1]}, "'tokens' of a row is 'a b'"),
        ("token-classification", {"tokens": ["a", "b"], "tags": [0]}, "'tags' of a row is"),
        ("question-answering", {"question": "a", "context": "b", "answers": "b"}, "'answers' of a row is"),
        (
            "question-answering",
            {"question": "a", "context": "b", "answers": {"text": ["b"], "answer_start": [1]}},
            "'answers' of a row is",
        ),
    ],
)
def test_rows_that_do_not_fit_the_task(
    task: str, row: dict[str, object], message: str, tokenizer: Any
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        list(Recipe(spec=spec(task), tokenizer=tokenizer, rows=rows_of(), held_out=rows_of(row)).make())
    assert caught.value.hint


def test_an_empty_text_for_a_tokenizer_that_adds_nothing() -> None:
    tokenizer = train_tokenizer(["a"], vocab_size=300, encloses=False)
    rows = [{"text": "", "label": 0}]
    with pytest.raises(UserError, match="has no tokens"):
        list(make_samples(rows, tokenizer, spec("sequence-classification"), LABELS))


def test_sequences_too_short_for_questions(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="too short for questions"):
        list(make_samples([], tokenizer, spec("question-answering", 8), LABELS))


def test_labels() -> None:
    assert collect_labels(["b", "a", "b"]) == Labels(("a", "b"))
    assert collect_labels([2, 0]) == Labels(("0", "1", "2"))
    mixed: list[list[int | str]] = [["a", 1], [-1, 0]]
    for bad in mixed:
        with pytest.raises(UserError, match="neither all names nor all numbers"):
            collect_labels(bad)


def test_a_sample_is_frozen() -> None:
    sample = LabelledSequence(ids=np.arange(2), labels=np.arange(2))
    with pytest.raises(AttributeError):
        sample.ids = np.arange(3)  # type: ignore[misc]


def test_translations_are_labels_of_their_own_length(tokenizer: Any) -> None:
    rows = rows_of(
        {"text": "in the town", "translation": "x"},
        {"text": "a", "translation": "the market of the town is open"},
    )
    found = make_samples(rows, tokenizer, spec("translation"), LABELS)
    texts = [tokenizer.decode(one.labels, skip_special_tokens=True) for one in found]
    assert texts == ["x", "the market of the town is open"]
    assert [tokenizer.decode(one.ids, skip_special_tokens=True) for one in found] == ["in the town", "a"]
    batch = collate(found, head=HEADS["translation"], pad_id=0)
    assert batch.labels is not None
    assert batch.labels.shape[1] == max(len(one.labels) for one in found) != batch.ids.shape[1]
    assert batch.num_targets == sum(len(one.labels) for one in found)


def test_a_row_without_its_translation_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no 'german'"):
        make_samples(
            rows_of({"text": "a", "translation": "b"}),
            tokenizer,
            spec("translation", pair_column="german"),
            LABELS,
        )
