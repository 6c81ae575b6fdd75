"""Metrics against figures worked out by hand, and by definition."""

import math
from typing import Any

import pytest
import sacrebleu
import torch

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.model.heads import IGNORED
from isthmus.model.stage import Batch
from isthmus.train.metrics import (
    Classes,
    Translations,
    added,
    check_best,
    f1,
    matthews,
    why_not_translated,
)


def test_two_classes_as_by_the_textbook() -> None:
    # 50 true negatives, 10 false positives, 5 false negatives, 35 true positives.
    confused = torch.tensor([[50, 10], [5, 35]])
    assert f1(confused) == pytest.approx(2 * 35 / (2 * 35 + 10 + 5))
    expected = (35 * 50 - 10 * 5) / math.sqrt((35 + 10) * (35 + 5) * (50 + 10) * (50 + 5))
    assert matthews(confused) == pytest.approx(expected)


def test_three_classes_and_guesses_that_are_always_the_same() -> None:
    perfect = torch.diag(torch.tensor([3, 4, 5]))
    assert f1(perfect) == pytest.approx(1.0)
    assert matthews(perfect) == pytest.approx(1.0)
    constant = torch.tensor([[3, 0, 0], [4, 0, 0], [5, 0, 0]])
    assert matthews(constant) == 0.0
    assert f1(constant) == pytest.approx((2 * 3 / 15) / 3)


class Words:
    """A tokenizer of one word for each id."""

    pad_token_id = 0

    def batch_decode(self, ids: torch.Tensor, *, skip_special_tokens: bool) -> list[str]:
        least = 1 if skip_special_tokens else 0
        return [" ".join(f"w{one}" for one in row if one >= least) for row in ids.tolist()]


def said(memory: torch.Tensor, mask: torch.Tensor | None, **_: object) -> torch.Tensor:
    """Says the first feature of each token of the memory."""
    assert mask is None
    return memory[:, :, 0].long()


def texts(ids: list[list[int]], meant: list[list[int]]) -> tuple[torch.Tensor, Batch]:
    labels = torch.tensor(meant)
    batch = Batch(ids=torch.tensor(ids), labels=labels, num_targets=labels.numel())
    return batch.ids[:, :, None].float(), batch


def test_classes_are_counted_without_ignored_ones() -> None:
    judge = Classes()
    labels = torch.tensor([0, 1, 1, IGNORED])
    batch = Batch(ids=labels[:, None], labels=labels, num_targets=3)
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0], [3.0, 1.0]])
    kept = [judge.keep(scores, None, batch, number=number) for number in range(2)]
    assert judge.counts(kept) == (2, 0, 2, 2)
    assert judge.metrics(judge.counts(kept))["accuracy"] == pytest.approx(2 / 3)
    assert judge.counts([]) == ()


def test_bleu_of_all_ranks_is_that_of_their_texts_together() -> None:
    judge = Translations(generate=said, tokenizer=Words(), max_texts=3)
    every = [
        texts([[1, 2, 3, 4, 5], [6, 7, 8, 9, 1]], [[1, 2, 3, 4, 6], [6, 7, 8, 9, IGNORED]]),
        texts([[1, 2, 3, 4, 4]], [[1, 2, 3, 4, 4]]),
        texts([[9]], [[9]]),
    ]
    kept = [judge.keep(memory, memory, batch, number=number) for number, (memory, batch) in enumerate(every)]
    # The first so many texts, by the number of a micro-batch.
    assert kept[2] is not None
    assert judge.keep(every[0][0], every[0][0], every[0][1], number=2) is None
    ranks = [judge.counts([one for one in own if one]) for own in (kept[:1], kept[1:2], [])]
    found = judge.metrics(added(ranks))
    hypotheses = ["w1 w2 w3 w4 w5", "w6 w7 w8 w9 w1", "w1 w2 w3 w4 w4"]
    references = ["w1 w2 w3 w4 w6", "w6 w7 w8 w9", "w1 w2 w3 w4 w4"]
    expected = sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert found == {"bleu": pytest.approx(expected)}
    assert judge.metrics([]) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": {"kind": "data"}}, "pipelines alone"),
        ({"data": {"task": "masked-lm"}}, "masked-lm is not judged by 'bleu'"),
        ({"data": {"task": "sequence-classification"}}, "is not judged by 'bleu'"),
        ({"data": {"validation_share": 0}}, "nothing is held out"),
        ({"train": {"evaluate_texts": 0}}, "no BLEU is known"),
    ],
)
def test_the_best_by_what_is_never_known_is_refused(changes: dict[str, Any], reason: str) -> None:
    check_best(job({}))
    with pytest.raises(UserError, match=reason) as caught:
        check_best(job(changes))
    assert caught.value.hint


def job(changes: dict[str, Any]) -> Job:
    values: dict[str, Any] = {
        "name": "judged",
        "model": {"config": {"model_type": "bart"}},
        "data": {"source": "builtin:pairs", "task": "translation"},
        "cloud": [{"name": "east"}],
        "strategy": {"kind": "pipeline"},
        "train": {"keep_best": "bleu"},
    }
    for section, own in changes.items():
        values[section] = own if "kind" in own else {**values[section], **own}
    return Job.model_validate(values)


def test_weights_are_kept_only_where_they_are_judged() -> None:
    with pytest.raises(ValueError, match="never evaluates"):
        job({"train": {"evaluate_every": 0}})
    assert why_not_translated(range(2, 4), 2, is_sharded=False) is None
    assert why_not_translated(range(3, 4), 2, is_sharded=False)
    assert why_not_translated(range(4), 2, is_sharded=True)
