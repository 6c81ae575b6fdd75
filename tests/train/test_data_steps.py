"""Data from its job to the steps of a run."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.model.heads import HEADS, IGNORED
from isthmus.model.stage import Batch
from isthmus.plan.pipeline_parts import Routing
from isthmus.train.data.samples import LabelledSequence, PackedSamples
from isthmus.train.data.training_data import (
    Feed,
    Layout,
    RankShare,
    TrainingData,
    check_enough,
    collate,
    divide_batch,
    open_data,
)

CONFIG = {"model_type": "llama", "vocab_size": 300}


def job(config: Mapping[str, object] = CONFIG, **data: object) -> Job:
    given = {"source": "builtin:tales", "sequence_length": 64, **data}
    return Job.model_validate(
        {"name": "x", "cloud": [{"name": "a"}], "model": {"config": config}, "data": given}
    )


@pytest.fixture(scope="module")
def tales(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    return open_data(job(), tokenizer_folder=tmp_path_factory.mktemp("run") / "tokenizer")


def open_files(folder: Path, texts: list[str], **data: Any) -> TrainingData:
    (folder / "a.txt").write_text("\n\n".join(texts))
    return open_data(job(source=str(folder / "a.txt"), **data), tokenizer_folder=folder / "tokenizer")


def layout(**values: int) -> Layout:
    return Layout(**{"num_microbatches": 2, "num_sequences": 3} | values)


def take(
    data: TrainingData, count: int, where: Layout, first_step: int = 0, share: RankShare | None = None
) -> list[Sequence[Batch]]:
    with Feed(data, where, first_step=first_step, share=share) as feed:
        return [feed.training(first_step + step) for step in range(count)]


def rows(steps: list[Sequence[Batch]]) -> list[tuple[int, ...]]:
    return [tuple(row) for step in steps for batch in step for row in batch.ids.tolist()]


def test_sequences_of_different_lengths_are_padded_on_the_right() -> None:
    samples = [
        LabelledSequence(ids=np.arange(1, 4), labels=np.arange(1, 4)),
        LabelledSequence(ids=np.array([7]), labels=np.array([7])),
    ]
    batch = collate(samples, head=HEADS["causal-lm"], pad_id=9)
    assert batch.ids.tolist() == [[1, 2, 3], [7, 9, 9]]
    assert batch.mask is not None
    assert batch.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.labels is not None
    assert batch.labels.tolist() == [[1, 2, 3], [7, IGNORED, IGNORED]]
    assert batch.num_targets == 2


def test_token_types_are_padded_too() -> None:
    samples = [
        LabelledSequence(ids=np.arange(count), labels=np.array(0), token_types=np.ones(count, np.uint8))
        for count in (2, 1)
    ]
    batch = collate(samples, head=HEADS["sequence-classification"], pad_id=0)
    assert batch.token_type_ids is not None
    assert batch.token_type_ids.tolist() == [[1, 1], [1, 0]]
    assert batch.num_targets == 2


def test_equal_lengths_need_no_mask() -> None:
    batch = collate(
        [LabelledSequence(ids=np.arange(2), labels=np.array([0, 1]))] * 2,
        head=HEADS["question-answering"],
        pad_id=0,
    )
    assert batch.mask is None
    assert batch.num_targets == 4


def test_a_batch_that_divides() -> None:
    assert divide_batch(batch_tokens=4096, sequence_length=128, num_microbatches=4) == Layout(
        num_microbatches=4, num_sequences=8
    )


@pytest.mark.parametrize(
    ("batch_tokens", "message", "near"),
    [
        (1000, "1000 tokens cannot be divided into 4 micro-batches × sequences of 128 tokens", 1024),
        (100, "100 tokens cannot be divided", 512),
    ],
)
def test_a_batch_that_does_not_divide(batch_tokens: int, message: str, near: int) -> None:
    with pytest.raises(UserError, match=message) as caught:
        divide_batch(batch_tokens=batch_tokens, sequence_length=128, num_microbatches=4)
    assert str(caught.value.hint).endswith(f"such as {near}")


def test_a_step(tales: TrainingData) -> None:
    (step,) = take(tales, 1, layout())
    assert [batch.ids.shape for batch in step] == [(3, 64)] * 2
    assert sum(batch.num_targets for batch in step) == 6 * 63
    assert all(batch.mask is None for batch in step)
    assert tales.facts.config == {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    assert tales.facts.num_labels is None


def test_resuming_equals_never_stopping(tales: TrainingData) -> None:
    first = len(tales.samples) // 6 - 2
    whole = take(tales, 6, layout(), first)
    for stop in range(1, 6):
        assert rows(take(tales, 6 - stop, layout(), first + stop)) == rows(whole[stop:])
    assert (first + 6) * 6 > len(tales.samples)


def test_ranks_read_each_sequence_once(tales: TrainingData) -> None:
    where = layout(num_microbatches=4)
    together = take(tales, 4, where)
    routing = Routing(num_ranks=(3,), num_microbatches=4)
    shards = [take(tales, 4, where, share=functools.partial(routing.share, 0, rank)) for rank in range(3)]
    assert sorted(rows(together)) == sorted(row for shard in shards for row in rows(shard))
    assert len({len(shard[0]) for shard in shards}) == 2


def test_validation_is_fixed_and_never_trained_on(tales: TrainingData) -> None:
    def validation() -> list[Batch]:
        return list(tales.validation_batches(num_sequences=4))

    first, second = validation(), validation()
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(first, second, strict=True))
    held_out = {tuple(row) for batch in first for row in batch.ids.tolist()}
    steps = take(tales, -(-len(tales.samples) // 6), layout())
    assert set(rows(steps)).isdisjoint(held_out)
    assert len(held_out) > 10


def test_a_feed_reads_any_step(tales: TrainingData) -> None:
    whole = take(tales, 3, layout())
    with Feed(tales, layout(), first_step=1) as feed:
        assert sum(len(batch.ids) for batch in feed.validation()) == len(tales.validation or ())
        for step in (1, 1, 2, 0, 1):
            assert torch.equal(feed.training(step)[1].ids, whole[step][1].ids)


@pytest.mark.parametrize(
    ("source", "task", "num_labels"),
    [
        ("tales", "masked-lm", None),
        ("messages", "sequence-classification", 6),
        ("names", "token-classification", 4),
        ("questions", "question-answering", None),
    ],
)
def test_every_task(source: str, task: str, num_labels: int | None, tmp_path: Path) -> None:
    bert = {"model_type": "bert", "vocab_size": 600}
    given = job(bert, source=f"builtin:{source}", task=task, sequence_length=96)
    data = open_data(given, tokenizer_folder=tmp_path / "tokenizer")
    (step,) = take(data, 1, layout(num_sequences=16))
    assert data.facts.num_labels == num_labels
    assert len(list(data.validation_batches(num_sequences=50))) >= 1
    for batch in step:
        assert batch.num_targets > 0
        assert batch.labels is not None
        assert batch.ids.max() < 600


def test_a_separate_validation_source(tmp_path: Path) -> None:
    (tmp_path / "held-out.jsonl").write_text('{"text": "never seen before"}\n')
    data = open_files(tmp_path, ["seen " * 100], validation_source=str(tmp_path / "held-out.jsonl"))
    (batch,) = data.validation_batches(num_sequences=4)
    assert data.tokenizer.decode(batch.ids[0]) == "never seen before<eos>"


def test_no_validation(tmp_path: Path) -> None:
    data = open_files(tmp_path, ["seen " * 100], validation_share=0)
    assert list(data.validation_batches(num_sequences=4)) == []


def test_data_too_short_for_one_step() -> None:
    samples = PackedSamples(tokens=np.arange(50), sequence_length=10, keeps_rest=False)
    check_enough(samples, layout(num_sequences=2))
    with pytest.raises(UserError, match="has 5 sequences to train on, but one step reads 6"):
        check_enough(samples, layout())


@pytest.mark.parametrize(
    ("texts", "data", "message"),
    [
        ([], {}, "holds too little to train on"),
        (["too short"] * 2, {"validation_share": 0}, "holds too little to train on"),
        (["a " * 200] * 3, {}, "a validation share of 0.05 leaves nothing"),
        (["a " * 200], {"validation_source": "{}/empty.txt"}, "holds nothing to evaluate on"),
    ],
)
def test_data_that_is_not_enough(
    texts: list[str], data: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").touch()
    given = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in data.items()}
    with pytest.raises(UserError, match=message) as caught:
        open_files(tmp_path, texts, **given)
    assert caught.value.hint


def test_sequences_longer_than_the_model_takes(tmp_path: Path) -> None:
    config = {**CONFIG, "max_position_embeddings": 32}
    with pytest.raises(UserError, match="64 tokens are longer than the model's 32 positions") as caught:
        open_data(job(config), tokenizer_folder=tmp_path / "tokenizer")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("set data.sequence_length to 32 or less, or raise")


def test_a_job_without_data(tmp_path: Path) -> None:
    bare = Job.model_validate({"name": "x", "cloud": [{"name": "a"}]})
    with pytest.raises(UserError, match=r"the job has no \[data\] section"):
        open_data(bare, tokenizer_folder=tmp_path)


def test_ranks_in_step_get_as_many_to_evaluate_and_no_more_that_counts(tales: TrainingData) -> None:
    plain = list(tales.validation_batches(num_sequences=4))
    even = list(tales.validation_batches(num_sequences=4, multiple_of=len(plain) - 1))
    assert len(even) == 2 * (len(plain) - 1)
    assert [one.num_targets for one in even[len(plain) :]] == [0] * (len(plain) - 2)
    assert sum(one.num_targets for one in even) == sum(one.num_targets for one in plain)
    labels = even[-1].labels
    assert labels is not None
    assert tales.head.num_targets(labels) == 0
