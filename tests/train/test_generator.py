"""Generators and a discriminator over links train to the bit like one process, whatever the delays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import FrameError, IsthmusError
from isthmus.model.random import RngKey, seed_from
from isthmus.model.stage import Batch, StageInput, StageOutput
from isthmus.plan.feed import (
    BatchTag,
    FeedStep,
    GeneratorDiscriminator,
    GeneratorLost,
    GeneratorStream,
    feed_scheduler,
)
from isthmus.plan.types import Member, Message, MessageKind, Outcome
from isthmus.train.generator import BATCH, BatchForm, Tokens, num_tokens, pack, unpack
from isthmus.train.wire import pack_message
from isthmus.wan.packet import Packet
from isthmus.wan.shaping import Shape
from tests.model.cases import PAD, VOCABULARY_SIZE
from tests.train.feeds import FORM, JUDGE, MASK, MAX_NORM, SCHEDULE, Trainee, source, stage, train, trainee
from tests.train.reference import PlainAdamW

NORTH, SOUTH = Member("north"), Member("south")
NEAR, FAR = Shape(delay_s=0.001), Shape(bandwidth_bps=100e3, delay_s=0.08)
ORDER = (0, 0, 1, 0, 0, 0, 1, 0)
"""Three batches of the first stream for one of the second."""
LOSS_WEIGHTS = (1.0, 0.25)


def feed(**more: Any) -> GeneratorDiscriminator:
    north = GeneratorStream(members=(NORTH,), quota=6, weight=3.0)
    south = GeneratorStream(members=(SOUTH,), quota=2, weight=1.0)
    bare = GeneratorDiscriminator(
        discriminator=(JUDGE,), generators=(north, south), batches_per_step=2, max_queued=3, max_kept=16
    )
    return replace(bare, **more)


class Plain:
    """A model and its optimizer, written out."""

    def __init__(self, *, is_generator: bool, seed: int, **changes: Any) -> None:
        self.stage, self.seed = stage(is_generator=is_generator, **changes), seed
        self.adamw = PlainAdamW(list(self.stage.model.parameters()), 0.1)
        self.step = 0

    def scores(self, batch: Batch, item: int) -> Tensor:
        key = RngKey(seed=self.seed, step=self.step, microbatch=item)
        output: StageOutput = self.stage(StageInput(batch=batch, rng_key=key, keeps_scores=True))
        self.graph = output
        assert output.scores is not None
        return output.scores

    def update(self, num_targets: int) -> None:
        for one in self.stage.model.parameters():
            if one.grad is not None:
                one.grad.mul_(1 / num_targets)
        self.adamw.update(SCHEDULE.at(self.step), MAX_NORM)
        self.step += 1

    @property
    def parameters(self) -> dict[str, Tensor]:
        return dict(self.stage.model.named_parameters())


def alone() -> tuple[dict[Member, dict[str, Tensor]], list[float]]:
    """All models trained in turn by one thread: no scheduler, no link, no message; and what was original."""
    generators = [Plain(is_generator=True, seed=20 + index, num_hidden_layers=1 + index) for index in (0, 1)]
    made = [
        [_generate(one, index, number) for number in range(6 - 4 * index)]
        for index, one in enumerate(generators)
    ]
    judge, taken, shares = Plain(is_generator=False, seed=20), [0, 0], []
    for step in range(len(ORDER) // 2):
        num_targets, num_replaced = 0, 0
        for item, index in enumerate(ORDER[2 * step : 2 * step + 2]):
            batch = made[index][taken[index]]
            taken[index] += 1
            judge.scores(batch, item)
            judge.graph.backward(loss_weight=LOSS_WEIGHTS[index])
            num_targets += batch.num_targets
            num_replaced += int((batch.labels == 1).sum())  # type: ignore[union-attr]
        shares.append(1 - num_replaced / num_targets)
        judge.update(num_targets)
    found = [judge, *generators]
    return {member: one.parameters for member, one in zip((JUDGE, NORTH, SOUTH), found, strict=True)}, shares


def _generate(own: Plain, index: int, number: int) -> Batch:
    batch = source(index).read(number, rank=0, num_ranks=1)
    scores = own.scores(batch, number)
    own.graph.backward()
    assert batch.labels is not None
    is_masked = batch.labels != -100
    logits = scores[is_masked]
    waits = [
        torch.empty(int(is_masked[row].sum()), logits.shape[1]).exponential_(
            generator=torch.Generator().manual_seed(seed_from("replacements", index, number, row))
        )
        for row in range(len(is_masked))
    ]
    drawn = (logits.softmax(-1) / torch.cat(waits)).argmax(-1)
    ids, labels = batch.ids.clone(), torch.zeros_like(batch.ids)
    ids[is_masked] = drawn
    labels[is_masked] = (drawn != batch.labels[is_masked]).long()
    mask = torch.ones_like(ids) if batch.mask is None else batch.mask
    own.update(int(is_masked.sum()))
    labels[mask == 0] = -100
    return Batch(ids=ids, mask=batch.mask, labels=labels, num_targets=int(mask.sum()))


def assert_same(found: Mapping[Member, Trainee], expected: Mapping[Member, Mapping[str, Tensor]]) -> None:
    for member, values in expected.items():
        own = found[member].parameters
        assert own.keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(own[name], value), (member, name)


@pytest.mark.parametrize("shapes", [(NEAR, FAR), (FAR, NEAR)], ids=["far", "farther"])
def test_all_models_equal_those_of_one_process(shapes: Sequence[Shape]) -> None:
    expected, shares = alone()
    found = train(feed(), shapes, loss_weights=LOSS_WEIGHTS)
    assert_same(found, expected)
    told = [one for one in found[JUDGE].record.told if isinstance(one, FeedStep)]
    assert [one.original_share for one in told] == pytest.approx(shares)
    assert [one.num_batches for one in told] == [(1 + 1, 0), (1, 1), (2, 0), (1, 1)]
    for one in told:
        assert 0 < one.accuracy < 1


def test_a_run_that_goes_on_from_what_was_saved_is_one_that_never_stopped() -> None:
    """Discriminator and generators go on from different saves: batches that the first lacks come again."""
    spec = feed(save_every_s=0.0)
    whole = train(spec, (NEAR, FAR), loss_weights=LOSS_WEIGHTS)
    from_here = {JUDGE: whole[JUDGE].saves[0], NORTH: whole[NORTH].saves[2], SOUTH: whole[SOUTH].saves[0]}
    assert from_here[JUDGE].step == 1
    again = train(spec, (FAR, NEAR), resumed=from_here, loss_weights=LOSS_WEIGHTS)
    assert_same(again, {member: one.parameters for member, one in whole.items()})


def test_the_log_of_a_run_gives_the_same_actions_to_a_fresh_scheduler() -> None:
    spec = feed(save_every_s=0.0)
    for member, own in train(spec, (NEAR, FAR)).items():
        fresh = feed_scheduler(spec, member)
        assert len(own.record.log) > 10
        for event, now_s, actions in own.record.log:
            assert repr(fresh.on(event, now_s)) == repr(actions)


# The objectives.


def test_the_loss_of_the_discriminator_is_over_all_tokens_but_padding() -> None:
    own = stage(is_generator=False).eval()
    batch = Batch(
        ids=torch.tensor([[5, 6, 7], [8, 9, PAD]]),
        mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        labels=torch.tensor([[0, 1, 0], [1, 0, -100]]),
        num_targets=5,
    )
    output = own(StageInput(batch=batch, keeps_scores=True))
    assert output.scores.shape == (2, 3, 1)
    valid, truth = output.scores[..., 0][batch.mask == 1], torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    assert float(output.loss.detach()) == pytest.approx(
        float(F.binary_cross_entropy_with_logits(valid, truth)) * 5
    )
    assert int(output.num_correct) == int(((valid > 0) == truth.bool()).sum())
    assert own.model.classifier.dense.weight.shape == (16, 16)


def test_tokens_are_drawn_by_their_shares_at_a_temperature() -> None:
    """Over many batches each token is drawn as often as the softmax says; those not masked stay."""
    actor = trainee(feed(), NORTH).actor
    actor._temperature = 2.0
    batch = source(0).read(0, rank=0, num_ranks=1)
    assert batch.labels is not None
    scores = torch.zeros(*batch.ids.shape, VOCABULARY_SIZE)
    scores[..., 7], scores[..., 9] = 9.0, 9.0 + 2 * math.log(3)
    drawn = [actor._replace(batch, scores, number=number) for number in range(400)]
    valid = torch.ones_like(batch.ids) == 1 if batch.mask is None else batch.mask == 1
    drawn = [one[:, : batch.ids.shape[1]][valid.numpy()] for one in drawn]
    is_masked, original = (batch.labels != -100)[valid].numpy(), batch.ids[valid].numpy()
    for one in drawn:
        assert np.array_equal(one[~is_masked], original[~is_masked] << 1)
    tokens = np.concatenate([one[is_masked] >> 1 for one in drawn])
    assert (tokens == 9).sum() / (tokens == 7).sum() == pytest.approx(3.0, rel=0.25)


def test_every_masked_token_becomes_the_mask() -> None:
    batch = source(1).read(3, rank=0, num_ranks=1)
    assert batch.labels is not None
    assert torch.equal(batch.ids == MASK, batch.labels != -100)


# What crosses.


def corrupted(form: BatchForm = FORM) -> Tokens:
    drawn = np.random.default_rng(0)
    shape = form.num_sequences, form.sequence_length
    lengths = drawn.integers(1, form.sequence_length + 1, size=(form.num_sequences, 1))
    values = drawn.integers(4, form.vocabulary_size, size=shape) << 1 | (drawn.random(shape) < 0.1)
    return np.where(np.arange(form.sequence_length) < lengths, values, -1)


@pytest.mark.parametrize("vocabulary_size", [53, 64, 65, 250_002])
def test_a_batch_crosses_as_it_is_in_as_few_bits_as_its_vocabulary_needs(vocabulary_size: int) -> None:
    form = replace(FORM, vocabulary_size=vocabulary_size)
    own = corrupted(form)
    data = pack(own, form)
    assert np.array_equal(unpack(data, form), own)
    bits = math.ceil(math.log2(vocabulary_size)) + 1
    assert len(data) == 4 * 3 + math.ceil(num_tokens(own) * bits / 8)


def damaged() -> dict[str, bytes]:
    own = corrupted()
    data = pack(own, FORM)

    def with_lengths(lengths: NDArray[np.int64]) -> bytes:
        return lengths.astype("<u4").tobytes() + data[4 * FORM.num_sequences :]

    lengths = (own >= 0).sum(1)
    return {
        "nothing": b"",
        "padding": pack(np.where(own >= 0, PAD << 1, -1), FORM),
        "beyond": pack(np.where(own >= 0, VOCABULARY_SIZE << 1, -1), FORM),
        "too long": with_lengths(lengths + np.array([12, 0, 0])),
        "an empty sequence": with_lengths(lengths * np.array([0, 1, 1])),
        "cut short": data[:-1],
        "a flood": data + bytes(FORM.max_bytes),
    }


@pytest.mark.parametrize("name", damaged())
def test_what_is_no_batch_is_refused(name: str) -> None:
    with pytest.raises(FrameError):
        unpack(damaged()[name], FORM)


def hostile(data: bytes, *, num_batches: int = 1) -> Any:
    """A generator that sends batches of these bytes, whatever it is allowed, and nothing else."""

    def play(link: Any) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for number in range(num_batches):
            tag = BatchTag(generator=1, number=number, version=0, num_tokens=num_tokens(corrupted()))
            message = Message(MessageKind.IDS, 0, number, SOUTH, (JUDGE,), tag)
            link.send("ids", pack_message(message, {BATCH: tensor}, {}, None))
        link.send("done", Packet({}))

    return play


@pytest.mark.parametrize("name", ["padding", "beyond"])
def test_a_generator_that_sends_nonsense_is_left_out_and_the_others_continue(name: str) -> None:
    spec = feed(on_lost="continue", wait_s=0.2)
    found = train(spec, (NEAR, NEAR), send={SOUTH: hostile(damaged()[name])})
    lost = [one for one in found[JUDGE].record.told if isinstance(one, GeneratorLost)]
    assert [(one.generator, one.next) for one in lost] == [(1, 0)]
    assert "batch" in lost[0].reason
    stop = found[JUDGE].stop
    assert stop is not None
    assert stop.outcome is Outcome.FINISHED
    told = [one for one in found[JUDGE].record.told if isinstance(one, FeedStep)]
    assert sum(one.num_batches[0] for one in told) == 6


def test_a_generator_that_floods_is_left_out_and_the_others_continue() -> None:
    """It sends forty batches at once where three may wait; those are trained on, no more of them is kept."""
    spec = feed(on_lost="continue", wait_s=0.2)
    spec = replace(spec, generators=(spec.generators[0], replace(spec.generators[1], quota=40)))
    found = train(spec, (NEAR, NEAR), send={SOUTH: hostile(pack(corrupted(), FORM), num_batches=40)})
    (lost,) = (one for one in found[JUDGE].record.told if isinstance(one, GeneratorLost))
    assert lost.generator == 1
    assert "may not send" in lost.reason
    told = [one for one in found[JUDGE].record.told if isinstance(one, FeedStep)]
    assert [sum(one.num_batches[index] for one in told) for index in (0, 1)] == [6, lost.next]
    assert spec.max_queued <= lost.next < 40
    assert not found[JUDGE].actor._queues


def test_a_generator_that_is_waited_for_fails_the_run_with_the_reason() -> None:
    with pytest.raises(IsthmusError, match="vocabulary"):
        train(feed(wait_s=0.2), (NEAR, NEAR), send={SOUTH: hostile(damaged()["beyond"])})
