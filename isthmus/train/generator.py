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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

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
from isthmus.train.data.samples import Order, Samples
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


Tokens = NDArray[np.int64]
"""Corrupted sequences, of shape (sequences, longest length): twice the id, and 1 more where it was replaced.

Padding, on the right, is -1.
"""


def num_tokens(tokens_BT: Tokens) -> int:
    """All tokens but padding."""
    return int((tokens_BT >= 0).sum())


def pack(tokens_BT: Tokens, form: BatchForm) -> bytes:
    """Lengths, then as many bits for an id as the vocabulary needs, and one for its label."""
    is_token_BT = tokens_BT >= 0
    bits_NW = (tokens_BT[is_token_BT][:, None] >> np.arange(form.token_bits) & 1).astype(np.uint8)
    lengths_B: Tokens = is_token_BT.sum(1)
    return lengths_B.astype("<u4").tobytes() + np.packbits(bits_NW).tobytes()


def unpack(data: bytes, form: BatchForm) -> Tokens:
    """What `pack` laid out; anything else is an error of the peer."""
    head = LENGTH_BYTES * form.num_sequences
    if not head < len(data) <= form.max_bytes:
        raise FrameError(f"a batch of {len(data)} bytes")
    lengths_B = np.frombuffer(data[:head], "<u4").astype(np.int64)
    number, width = int(lengths_B.sum()), form.token_bits
    if lengths_B.min() < 1 or lengths_B.max() > form.sequence_length:
        raise FrameError("a batch with sequences that are empty or too long")
    if len(data) - head != math.ceil(number * width / 8):
        raise FrameError("a batch whose bytes do not fit its lengths")
    bits_NW = np.unpackbits(np.frombuffer(data[head:], np.uint8), count=number * width).reshape(-1, width)
    values_N = bits_NW.astype(np.int64) @ (1 << np.arange(width))
    highest = values_N.max() >> 1
    if highest >= form.vocabulary_size:
        raise FrameError(f"a batch with token {highest} of a vocabulary of {form.vocabulary_size}")
    if (values_N >> 1 == form.pad_id).all():
        raise FrameError("a batch of nothing but padding")
    tokens_BT = np.full((form.num_sequences, form.sequence_length), -1)
    tokens_BT[np.arange(form.sequence_length) < lengths_B[:, None]] = values_N
    return tokens_BT


def labelled(tokens_BT: Tokens, form: BatchForm) -> Batch:
    """A micro-batch up to its longest sequence, with a label for each token."""
    length = int((tokens_BT >= 0).sum(1).max())
    own_BT = torch.from_numpy(tokens_BT[:, :length])
    is_token_BT = own_BT >= 0
    return Batch(
        ids=torch.where(is_token_BT, own_BT >> 1, form.pad_id),
        num_targets=int(is_token_BT.sum()),
        mask=None if bool(is_token_BT.all()) else is_token_BT.long(),
        labels=torch.where(is_token_BT, own_BT & 1, IGNORED),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedBatches:
    """The batches of a generator's data, in an order and with masks that its seed decides."""

    samples: Samples
    seed: int
    num_sequences: int
    pad_id: int

    def read(self, number: int, *, rank: int, num_ranks: int) -> Batch:
        """The sequences of a rank; labels are the original ids where a token is masked."""
        order = Order(num_samples=len(self.samples), seed=self.seed)
        picks = order.take(number * self.num_sequences, self.num_sequences)
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

    def end_step(self, work: Work) -> Gathered:
        """Reduce what micro-batches have left, or update the weights; nothing else ends a step."""
        match work.kind:
            case WorkKind.REDUCE:
                return self._reduce()
            case WorkKind.UPDATE:
                return Gathered(of=(self._update(work),))
            case _:
                raise ValueError(f"no cloud of this kind does {work.kind.value}")

    def _reduce(self) -> Gathered:
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

    def _update(self, work: Work) -> Updated:
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
        source: MaskedBatches,
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
        return self._generate(work) if work.kind is WorkKind.GENERATE else self._model.end_step(work)

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
        own_BT = self._replace(batch, output.scores, number=work.item)
        parts = world.gather_bytes(own_BT.tobytes())
        if parts is not None:
            self._kept.put(work.item, pack(self._joined(parts), self._form))
        return gathered(world, Generated(num_tokens=num_tokens(own_BT)))

    def _joined(self, parts: Sequence[bytes]) -> Tokens:
        """The sequences in the order of the batch, of which the ranks have taken turns."""
        tokens_BT = np.empty((self._form.num_sequences, self._form.sequence_length), np.int64)
        for rank, part in enumerate(parts):
            tokens_BT[rank :: len(parts)] = _from_bytes(part, self._form)
        return tokens_BT

    def _replace(self, batch: Batch, scores: Tensor, *, number: int) -> Tokens:
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
        tokens = ids << 1 | is_replaced
        if batch.mask is not None:
            tokens[batch.mask == 0] = -1
        room = self._form.sequence_length - tokens.shape[1]
        found: Tokens = functional.pad(tokens, (0, room), value=-1).numpy()
        return found


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
        self._queues: defaultdict[tuple[Member, int], deque[Tokens]] = defaultdict(deque)

    def run(self, work: Work) -> Facts | None:
        """Carry out a work."""
        if work.kind is not WorkKind.DISCRIMINATE:
            return self._model.end_step(work)
        self._discriminate(work)
        return None

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
        if isinstance(message.facts, BatchTag) and message.facts.num_tokens != num_tokens(found):
            raise FrameError(f"{message.name} of {num_tokens(found)} tokens, which says otherwise")
        self._queues[message.sender, message.item].append(found)

    def drop(self, message: Message) -> None:
        """Forget a batch that arrived last and is not needed."""
        self._pop(message.sender, message.item, deque.pop)

    def _pop(self, sender: Member, number: int, pop: Callable[[deque[Tokens]], Tokens]) -> Tokens:
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
            data = bytes([generator]) + found.tobytes()
        data = world.broadcast_bytes(data)
        own_BT = _from_bytes(data[1:], self._form)[world.rank :: world.num_ranks]
        batch = labelled(own_BT, self._form)
        output = self._model.train_on(batch, work, loss_weight=self._loss_weights[data[0]])
        if output.scores is None or batch.labels is None:
            raise ValueError("a discriminator's stage gives the scores of its batch")
        labels = batch.labels.to(output.scores.device)
        num_replaced = int((batch.labels == 1).sum())
        self._model.count(DETECTION.num_correct(output.scores, labels), num_replaced)


def _from_bytes(data: bytes, form: BatchForm) -> Tokens:
    """The sequences that another rank of this cloud has made; ranks trust each other."""
    return np.frombuffer(data, np.int64).reshape(-1, form.sequence_length).copy()
