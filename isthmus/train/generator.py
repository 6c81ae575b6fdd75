"""The actors of generator–discriminator pre-training.

    generator       batch n ─ mask ─► forward ─► sample ─► ids and labels ─► kept until covered ══IDS══►
                                         └─► backward over masked tokens          REDUCE, UPDATE
    discriminator   ══IDS══► check ─► forward, backward over all tokens           REDUCE, UPDATE

A generator reads its batches by their numbers alone. What it masks, draws and drops out is a function of seed
and number, so a batch that is made again from the same weights is the same. The ranks of a cloud share the
sequences of each batch; the leader gathers or broadcasts what crosses.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import FrameError
from isthmus.events import Span
from isthmus.model.heads import DETECTION, HEADS, IGNORED
from isthmus.model.random import seed_from
from isthmus.model.stage import Batch, StageOutput
from isthmus.plan.end_of_step import Seen, Updated, condensed, total_norm
from isthmus.plan.feed import BatchTag, FeedReduced, Generated
from isthmus.plan.feed_plan import LENGTH_BYTES, batch_bytes, token_bits
from isthmus.plan.types import (
    Facts,
    Gathered,
    Member,
    Message,
    MessageKind,
    Work,
    WorkKind,
    pack_facts,
    unpack_facts,
)
from isthmus.train.build import BuiltStage
from isthmus.train.data.samples import Cursor, Order, Samples
from isthmus.train.data.training_data import collate
from isthmus.train.device import Mark, PassClock
from isthmus.train.in_cloud import Reduction, World
from isthmus.train.pipeline import Passes

BATCH: Final = "batch"
"""The one tensor of IDS: the length of each sequence, then an id and a label of each token, bit by bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm(Facts):
    """What all clouds know of a batch; nothing that arrives may be larger."""

    num_sequences: int
    sequence_length: int
    vocabulary_size: int
    pad_id: int

    @property
    def token_bits(self) -> int:
        """The bits of a token: its id and one for the label."""
        return token_bits(self.vocabulary_size)

    @property
    def max_bytes(self) -> int:
        """The size of a batch without padding."""
        return batch_bytes(
            num_sequences=self.num_sequences,
            sequence_length=self.sequence_length,
            vocabulary_size=self.vocabulary_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted:
    """Sequences one after the other without padding: their lengths, and the id and label of each token."""

    lengths_B: NDArray[np.int64]
    ids_N: NDArray[np.int64]
    is_replaced_N: NDArray[np.bool_]

    @property
    def num_tokens(self) -> int:
        return len(self.ids_N)

    def sequences(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """The ids and labels of each sequence."""
        ends = np.cumsum(self.lengths_B)[:-1]
        return zip(np.split(self.ids_N, ends), np.split(self.is_replaced_N, ends), strict=True)

    def pack(self, form: BatchForm) -> bytes:
        """As many bits for an id as the vocabulary needs, and one for its label."""
        values_N1 = (self.ids_N << 1 | self.is_replaced_N)[:, None]
        bits_NW = (values_N1 >> np.arange(form.token_bits) & 1).astype(np.uint8)
        return self.lengths_B.astype("<u4").tobytes() + np.packbits(bits_NW).tobytes()

    def batch(self, form: BatchForm, *, rank: int, num_ranks: int) -> Batch:
        """The sequences of a rank, padded, with a label for each token."""
        own = list(self.sequences())[rank::num_ranks]
        width = max(len(ids_T) for ids_T, _ in own)
        ids_BT = torch.full((len(own), width), form.pad_id)
        labels_BT = torch.full((len(own), width), IGNORED)
        for place, (ids_T, is_replaced_T) in enumerate(own):
            ids_BT[place, : len(ids_T)] = torch.from_numpy(ids_T)
            labels_BT[place, : len(ids_T)] = torch.from_numpy(is_replaced_T.astype(np.int64))
        is_token_BT = labels_BT != IGNORED
        mask_BT = None if bool(is_token_BT.all()) else is_token_BT.long()
        return Batch(ids=ids_BT, num_targets=int(is_token_BT.sum()), mask=mask_BT, labels=labels_BT)


def unpack(data: bytes, form: BatchForm) -> Corrupted:
    """What `Corrupted.pack` laid out; anything else is an error of the peer."""
    head = LENGTH_BYTES * form.num_sequences
    if not head < len(data) <= form.max_bytes:
        raise FrameError(f"a batch of {len(data)} bytes")
    lengths_B = np.frombuffer(data[:head], "<u4").astype(np.int64)
    num_tokens, width = int(lengths_B.sum()), form.token_bits
    if lengths_B.min() < 1 or lengths_B.max() > form.sequence_length:
        raise FrameError("a batch with sequences that are empty or too long")
    if len(data) - head != math.ceil(num_tokens * width / 8):
        raise FrameError("a batch whose bytes do not fit its lengths")
    bits_NW = np.unpackbits(np.frombuffer(data[head:], np.uint8), count=num_tokens * width).reshape(-1, width)
    values_N = bits_NW.astype(np.int64) @ (1 << np.arange(width))
    ids_N = values_N >> 1
    if ids_N.max() >= form.vocabulary_size:
        raise FrameError(f"a batch with token {ids_N.max()} of a vocabulary of {form.vocabulary_size}")
    if (ids_N == form.pad_id).all():
        raise FrameError("a batch of nothing but padding")
    return Corrupted(lengths_B=lengths_B, ids_N=ids_N, is_replaced_N=(values_N & 1).astype(np.bool_))


class BatchSource(Protocol):
    """Gives a generator its masked batches."""

    def read(self, number: int, *, rank: int, num_ranks: int) -> Batch:
        """The sequences of a rank; labels are the original ids where a token is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedBatches:
    """The batches of a generator's data, in an order and with masks that its seed decides."""

    samples: Samples
    seed: int
    num_sequences: int
    pad_id: int

    def read(self, number: int, *, rank: int, num_ranks: int) -> Batch:
        """The sequences of a rank; labels are the original ids where a token is masked."""
        epoch, position = divmod(number * self.num_sequences, len(self.samples))
        order = Order(num_samples=len(self.samples), seed=self.seed)
        picks, _ = order.take(Cursor(epoch=epoch, position=position), self.num_sequences)
        own = [self.samples.read(pick) for pick in picks[rank::num_ranks]]
        return collate(own, head=HEADS["masked-lm"], pad_id=self.pad_id)


class WholeModel:
    """Trains a whole model in one cloud; each micro-batch runs forwards and backwards at once.

    Losses are summed over a step and averaged over all its targets when it ends.
    """

    def __init__(self, built: BuiltStage, *, seed: int, track: str, on_span: Callable[[Span], None]) -> None:
        self.world: World = built.world
        self._built = built
        self._reduction = built.reduction or Reduction(built.world, built.stage)
        self._clock = PassClock(built.device, track=track, on_span=on_span)
        self._passes = Passes(
            built.stage,
            device=built.device.torch_device,
            seed=seed,
            autocast=built.autocast,
            on_near_end=self._clock.near_end,
            keeps_scores=True,
        )
        self._losses: list[Tensor] = []
        self._corrects: list[Tensor] = []
        self._num_targets = self._num_replaced = 0
        self._norm = 0.0

    def train_on(self, batch: Batch, work: Work, *, loss_weight: float = 1.0) -> StageOutput:
        """Run a micro-batch forwards and backwards."""
        if not self._losses:
            self._clock.begin()
            self._reduction.begin()
            self._passes.train(True)
        item = work.item * self.world.num_ranks + self.world.rank

        def compute() -> StageOutput:
            output = self._passes.forward(batch, {}, step=work.step, item=item, num_step_targets=1)
            self._passes.in_flight.clear()
            output.backward(loss_weight=loss_weight)
            return output

        output, _ = self._clock.run(work.kind.value, work.name, compute)
        if output.loss is not None:
            self._losses.append(output.loss.detach())
        self._num_targets += batch.num_targets
        return output

    def count(self, num_correct: Tensor, num_replaced: int) -> None:
        """Count what a discriminator told rightly."""
        self._corrects.append(num_correct)
        self._num_replaced += num_replaced

    def reduce(self) -> Gathered:
        """Average the gradients over all targets of the step, and read losses from the device."""
        self._clock.settle()
        self._reduction.reduce()
        (num_targets,) = self.world.all_reduce((self._num_targets,))
        self._built.optimizer.scale(1 / max(num_targets, 1))
        norms = self._reduction.squared_norms(self._built.optimizer.squared_norms())
        self._norm = total_norm(norms)
        own = FeedReduced(
            seen=Seen(),
            loss_sum=math.fsum(torch.stack(self._losses).tolist()),
            squared_norms=condensed(norms),
            busy_s=self._clock.take_busy_s(),
            num_targets=self._num_targets,
            num_correct=int(torch.stack(self._corrects).sum()) if self._corrects else 0,
            num_replaced=self._num_replaced,
        )
        self._losses, self._corrects, self._num_targets, self._num_replaced = [], [], 0, 0
        return gathered(self.world, own)

    def update(self, work: Work) -> Updated:
        """Take a step of the optimizer."""
        optimizer = self._built.optimizer
        self._clock.run(work.kind.value, work.name, lambda: optimizer.update(work.step, norm=self._norm))
        return Updated(verdict=None, learning_rate=optimizer.schedule.at(work.step))


def gathered(world: World, own: Facts) -> Gathered:
    """The facts of all ranks of this cloud at its leader; those of this rank elsewhere."""
    texts = world.gather(pack_facts(own))
    return Gathered(of=(own,) if texts is None else tuple(unpack_facts(one, type(own)) for one in texts))


class KeptBatches:
    """The batches that no save of the discriminator covers, each in a row by its number."""

    def __init__(self, max_kept: int, form: BatchForm) -> None:
        self._rows = torch.zeros(max_kept, form.max_bytes, dtype=torch.uint8)
        self._sizes = torch.zeros(max_kept, dtype=torch.int64)

    def put(self, number: int, data: bytes) -> None:
        """Keep a batch in the place of one that is covered."""
        row = number % len(self._rows)
        self._rows[row, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._sizes[row] = len(data)

    def get(self, number: int) -> Tensor:
        """A copy of a batch: its row may have another one before this one has left."""
        row = number % len(self._rows)
        return self._rows[row, : int(self._sizes[row])].clone()

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds of them, loaded in place."""
        return {"feed/kept": self._rows, "feed/kept_sizes": self._sizes}


class GeneratorActor:
    """Makes batches, keeps them, and trains the generator on them."""

    def __init__(
        self,
        model: WholeModel,
        form: BatchForm,
        source: BatchSource,
        kept: KeptBatches,
        *,
        seed: int,
        temperature: float,
    ) -> None:
        self._model = model
        self._form = form
        self._source = source
        self._kept = kept
        self._seed = seed
        self._temperature = temperature

    def run(self, work: Work) -> Facts | None:
        """Carry out a work."""
        match work.kind:
            case WorkKind.GENERATE:
                return self._generate(work)
            case WorkKind.REDUCE:
                return self._model.reduce()
            case WorkKind.UPDATE:
                return Gathered(of=(self._model.update(work),))
            case _:
                raise ValueError(f"a generator does not {work.kind.value}")

    def tensors(self, message: Message) -> tuple[Mapping[str, Tensor], Mark]:
        """A batch that is kept; nothing else carries tensors."""
        if message.kind is not MessageKind.IDS:
            return {}, Mark()
        return {BATCH: self._kept.get(message.item)}, Mark()

    def take(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """Nothing that arrives has tensors."""

    def drop(self, message: Message) -> None:
        """A row is overwritten by its next batch."""

    def _generate(self, work: Work) -> Gathered:
        world = self._model.world
        batch = self._source.read(work.item, rank=world.rank, num_ranks=world.num_ranks)
        output = self._model.train_on(batch, work)
        if output.scores is None or batch.labels is None:
            raise ValueError("a generator's stage gives the scores of its batch")
        own = self._replace(batch, output.scores, number=work.item)
        parts = world.gather_bytes(_to_bytes(own))
        if parts is not None:
            data = _interleaved([_from_bytes(one) for one in parts]).pack(self._form)
            self._kept.put(work.item, data)
        return gathered(world, Generated(num_tokens=own.num_tokens))

    def _replace(self, batch: Batch, scores: Tensor, *, number: int) -> Corrupted:
        """Draw a token for each that is masked; one that is drawn as it was counts as original."""
        labels = batch.labels if batch.labels is not None else batch.ids
        is_masked = labels != IGNORED
        logits = scores[is_masked.to(scores.device), : self._form.vocabulary_size].float() / self._temperature
        # The largest share over an exponential number is as likely as its share.
        waits, world, drawing = torch.empty_like(logits), self._model.world, torch.Generator(logits.device)
        start = 0
        for place, num_masked in enumerate(is_masked.sum(1).tolist()):
            # Each sequence has draws of its own, whichever rank it is at.
            row = place * world.num_ranks + world.rank
            drawing.manual_seed(seed_from("replacements", self._seed, number, row))
            waits[start : start + num_masked].exponential_(generator=drawing)
            start += num_masked
        drawn = (logits.softmax(-1) / waits).argmax(-1).cpu()
        ids, is_replaced = batch.ids.clone(), torch.zeros_like(is_masked)
        ids[is_masked], is_replaced[is_masked] = drawn, drawn != labels[is_masked]
        mask = torch.ones_like(is_masked) if batch.mask is None else batch.mask.bool()
        return Corrupted(
            lengths_B=mask.sum(1).numpy(), ids_N=ids[mask].numpy(), is_replaced_N=is_replaced[mask].numpy()
        )


class DiscriminatorActor:
    """Trains the discriminator on batches in the order that the scheduler says."""

    def __init__(
        self,
        model: WholeModel,
        form: BatchForm,
        generators: Sequence[Member],
        *,
        loss_weights: Sequence[float],
    ) -> None:
        self._model = model
        self._form = form
        self._generators = generators
        """The leaders of the generators' clouds, by number."""
        self._loss_weights = loss_weights
        self._queues: defaultdict[tuple[Member, int], deque[Corrupted]] = defaultdict(deque)

    def run(self, work: Work) -> Facts | None:
        """Carry out a work."""
        match work.kind:
            case WorkKind.DISCRIMINATE:
                self._discriminate(work)
                return None
            case WorkKind.REDUCE:
                return self._model.reduce()
            case WorkKind.UPDATE:
                return Gathered(of=(self._model.update(work),))
            case _:
                raise ValueError(f"a discriminator does not {work.kind.value}")

    def tensors(self, message: Message) -> tuple[Mapping[str, Tensor], Mark]:  # noqa: ARG002 - it answers in facts
        """Nothing that a discriminator sends has tensors."""
        return {}, Mark()

    def take(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """Check a batch and queue it; a duplicate lies behind the first until it is dropped."""
        if message.kind is not MessageKind.IDS:
            return
        data = tensors.get(BATCH)
        if data is None or data.is_floating_point() or data.ndim != 1 or not len(data):
            raise FrameError(f"{message.name} without a batch")
        if data.min() < 0 or data.max() > np.iinfo(np.uint8).max:
            raise FrameError(f"{message.name} with what are no bytes")
        found = unpack(data.to(torch.uint8).numpy().tobytes(), self._form)
        if isinstance(message.facts, BatchTag) and message.facts.num_tokens != found.num_tokens:
            raise FrameError(f"{message.name} of {found.num_tokens} tokens, which says otherwise")
        self._queues[message.sender, message.item].append(found)

    def drop(self, message: Message) -> None:
        """Forget a batch that arrived last and is not needed."""
        self._pop(message.sender, message.item, deque.pop)

    def _pop(self, sender: Member, number: int, pop: Callable[[deque[Corrupted]], Corrupted]) -> Corrupted:
        queue = self._queues[sender, number]
        found = pop(queue)
        if not queue:
            del self._queues[sender, number]
        return found

    def _discriminate(self, work: Work) -> None:
        world, data = self._model.world, b""
        if isinstance(work.facts, BatchTag):
            generator = work.facts.generator
            found = self._pop(self._generators[generator], work.facts.number, deque.popleft)
            data = bytes([generator]) + _to_bytes(found)
        data = world.broadcast_bytes(data)
        batch = _from_bytes(data[1:]).batch(self._form, rank=world.rank, num_ranks=world.num_ranks)
        output = self._model.train_on(batch, work, loss_weight=self._loss_weights[data[0]])
        if output.scores is None or batch.labels is None:
            raise ValueError("a discriminator's stage gives the scores of its batch")
        labels = batch.labels.to(output.scores.device)
        num_replaced = int((batch.labels == 1).sum())
        self._model.count(DETECTION.num_correct(output.scores, labels), num_replaced)


def _to_bytes(batch: Corrupted) -> bytes:
    """For the ranks of one cloud, which trust each other."""
    values_N = batch.ids_N << 1 | batch.is_replaced_N
    return np.concatenate(([len(batch.lengths_B)], batch.lengths_B, values_N)).astype("<i8").tobytes()


def _from_bytes(data: bytes) -> Corrupted:
    (number,), rest = np.split(np.frombuffer(data, "<i8").astype(np.int64), [1])
    lengths_B, values_N = np.split(rest, [number])
    return Corrupted(lengths_B=lengths_B, ids_N=values_N >> 1, is_replaced_N=(values_N & 1).astype(np.bool_))


def _interleaved(parts: Sequence[Corrupted]) -> Corrupted:
    """The sequences in the order of the batch, of which the ranks have taken turns."""
    rows = zip_longest(*(list(one.sequences()) for one in parts))
    in_order = [sequence for row in rows for sequence in row if sequence is not None]
    return Corrupted(
        lengths_B=np.array([len(ids_T) for ids_T, _ in in_order]),
        ids_N=np.concatenate([ids_T for ids_T, _ in in_order]),
        is_replaced_N=np.concatenate([is_replaced_T for _, is_replaced_T in in_order]),
    )
