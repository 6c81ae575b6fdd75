"""Texts that stay in the clouds of an encoder, and translations in those of its decoder."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.errors import IsthmusError, UserError
from isthmus.job import Job
from isthmus.model.stage import Batch
from isthmus.plan.codecs import codec_levels
from isthmus.train.data.tokenizer import train_tokenizer
from isthmus.train.data.training_data import TrainingData, check_paired, open_data
from isthmus.train.pipeline import PipelineConfig, _read_microbatch
from isthmus.train.pipeline_config import check_apart, decide
from isthmus.train.pipeline_role import PipelineKind
from tests.train.chain import Given, chain
from tests.train.reference import assert_same, parameters_of
from tests.train.resuming import keep_all, take_up
from tests.train.test_encoder_decoder import STEPS, of_layers, translator
from tests.train.test_exactness import alone

PAIRING = "6 ids vocabulary"
ROWS = [
    {"id": f"row {number}", "text": f"one {number}", "translation": f"unu {number}"} for number in range(40)
]


def keyed(batch: Batch, number: int) -> Batch:
    return replace(batch, keys=torch.arange(len(batch.ids)) + 2**61 + 100 * number)


def parted(steps: Sequence[Sequence[Batch]]) -> tuple[Given, Given]:
    """The texts of all micro-batches, and their translations."""
    every = [
        [keyed(batch, 10 * step + item) for item, batch in enumerate(one)] for step, one in enumerate(steps)
    ]
    texts = [[replace(batch, labels=None, num_targets=0) for batch in one] for one in every]
    said = [[replace(batch, ids=torch.ones_like(batch.labels), mask=None) for batch in one] for one in every]  # type: ignore[arg-type]
    return Given(texts, texts[0]), Given(said, said[0])


def apart(*layers: int, **changes: Any) -> PipelineConfig:
    return replace(of_layers(*layers, **changes), pairing=PAIRING)


@pytest.mark.parametrize("layers", [(2, 2), (1, 1, 2), (2, 1, 1)])
def test_what_is_read_apart_trains_as_in_one_process(layers: tuple[int, ...]) -> None:
    plan = translator("bart")
    agreed = apart(*layers, evaluate_every=2, num_validation_microbatches=2)
    texts, translations = parted(STEPS)
    with chain(plan, agreed) as found:
        found.run(texts, targets=translations)
    expected, losses = alone(plan, STEPS)
    assert_same(parameters_of(found.stages), expected)
    assert [one.loss for one in found.records[0].steps] == pytest.approx(losses, rel=1e-6)
    assert found.records[0].evaluations[-1].num_targets == sum(batch.num_targets for batch in STEPS[0])


def test_a_resumed_run_that_reads_apart_ends_with_the_same_weights() -> None:
    plan, agreed = translator("bart"), apart(2, 2)
    texts, translations = parted(STEPS)
    with chain(plan, agreed) as found:
        kept = keep_all(found)
        found.run(texts, targets=translations)
    with chain(plan, agreed) as resumed:
        states = take_up(resumed, kept, 2)
        resumed.run(texts, targets=translations, first_step=2, states=states)
    assert_same(parameters_of(resumed.stages), alone(plan, STEPS)[0])


def test_texts_do_not_cross_and_their_frozen_memory_crosses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = translator("bart")
    agreed = apart(2, 2, first_trained=1, cache_bytes=10**6)
    texts, translations = (Given([one.steps[0]] * 3) for one in parted(STEPS))
    arrived: list[dict[str, torch.Tensor]] = []

    def note(tensors: dict[str, torch.Tensor]) -> Any:
        arrived.append(dict(tensors))
        return _read_microbatch(tensors)

    monkeypatch.setattr("isthmus.train.pipeline._read_microbatch", note)
    with chain(plan, agreed, num_frozen_layers=2) as found:
        found.run(texts, targets=translations)
    assert len(arrived) == 6
    assert all(not one["ids"].any() and "labels" not in one for one in arrived)
    sizes = [span.num_bytes or 0 for span in found.records[1].spans if span.kind == "transfer"]
    assert max(sizes[2:]) < min(sizes[:2]) / 2


def test_translations_of_other_texts_are_found_out() -> None:
    texts, translations = parted(STEPS)
    other = Given([translations.steps[1], *translations.steps[1:]])
    with chain(translator("bart"), apart(2, 2)) as found, pytest.raises(IsthmusError, match="other texts"):
        found.run(texts, targets=other)


# From the rows of two clouds.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("apart")
    texts = [row[key] for row in ROWS for key in ("text", "translation")]
    train_tokenizer(texts, vocab_size=300, encloses=True).save_pretrained(place / "tokenizer")
    write(place / "texts.jsonl", [{"id": row["id"], "text": row["text"]} for row in ROWS])
    write(
        place / "said.jsonl",
        [{"id": row["id"], "translation": row["translation"]} for row in reversed(ROWS)],
    )
    return place


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def job(folder: Path, *, said: str = "said.jsonl", **link: Any) -> Job:
    values = {
        "name": "apart",
        "model": {"config": {"model_type": "bart", "vocab_size": 300, "max_position_embeddings": 64}},
        "data": {
            "source": str(folder / "texts.jsonl"),
            "task": "translation",
            "id_column": "id",
            "sequence_length": 32,
            "tokenizer": str(folder / "tokenizer"),
            "validation_share": 0.2,
        },
        "cloud": [
            {"name": "east", "listen": "127.0.0.1:7600"},
            {"name": "west", "data": {"source": str(folder / said)}},
        ],
        "link": [{"between": ["east", "west"], "boundary": "memory", **link}],
        "strategy": {"kind": "pipeline"},
        "train": {"batch_tokens": 128},
    }
    return Job.model_validate(values)


def opened(job: Job, cloud: str, tmp_path: Path) -> TrainingData:
    return open_data(PipelineKind().data_job(job, cloud), tokenizer_folder=tmp_path / cloud)


def test_both_clouds_read_the_same_pairs_in_any_order(folder: Path, tmp_path: Path) -> None:
    texts, said = (opened(job(folder), cloud, tmp_path) for cloud in ("east", "west"))
    check_paired(texts.pairing, said.pairing)
    assert texts.validation is not None
    assert 0 < len(texts.validation) < 20
    for own, other in zip(
        texts.validation_batches(num_sequences=4), said.validation_batches(num_sequences=4), strict=True
    ):
        assert own.labels is None
        assert other.labels is not None
        assert own.keys is not None
        assert other.keys is not None
        assert torch.equal(own.keys, other.keys)
        sources = texts.tokenizer.batch_decode(own.ids, skip_special_tokens=True)
        targets = said.tokenizer.batch_decode(other.labels.clamp(min=0), skip_special_tokens=True)
        assert targets == [text.replace("one", "unu") for text in sources]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (ROWS[:-1], "the 39 translations"),
        ([{**ROWS[0], "id": "row x"}, *ROWS[1:]], "the 40 translations"),
        ([*ROWS, ROWS[3]], "'row 3' is in the data twice"),
        ([], "not one sequence"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    folder: Path, tmp_path: Path, rows: list[dict[str, str]], reason: str
) -> None:
    write(folder / "other.jsonl", rows)
    texts = opened(job(folder), "east", tmp_path)
    with pytest.raises(UserError, match=reason) as caught:
        check_paired(texts.pairing, opened(job(folder, said="other.jsonl"), "west", tmp_path).pairing)
    assert caught.value.hint


def test_jobs_that_cannot_read_apart_are_refused(folder: Path) -> None:
    good = job(folder)
    assert decide(good).num_microbatches
    check_apart(good, [range(2), range(2, 4)], 2)
    with pytest.raises(UserError, match="no cut lies between"):
        check_apart(good, [range(1), range(1, 4)], 2)
    for changes in (
        {"codec": "subspace(8, anchor=tokens) | int4"},
        {"boundary": "bottleneck(8, anchor=tokens, warmup=2)"},
    ):
        with pytest.raises(UserError, match="needs the ids of the texts"):
            check_apart(job(folder, **changes), [range(2), range(2, 4)], 2)
    assert good.data is not None
    bare = good.model_copy(update={"data": good.data.model_copy(update={"id_column": None})})
    with pytest.raises(UserError, match="has data of its own"):
        decide(bare)
    own = good.model_copy(update={"data": good.data.model_copy(update={"tokenizer": "trained"})})
    with pytest.raises(UserError, match="cannot be trained"):
        decide(own)


def test_levels_of_codecs_leave_anchors_out_where_no_ids_cross() -> None:
    assert not any("anchor" in str(level.forward) for level in codec_levels(64, shares_ids=False))
    assert any("anchor" in str(level.forward) for level in codec_levels(64, shares_ids=True))
