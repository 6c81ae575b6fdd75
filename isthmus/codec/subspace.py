"""Rows in a subspace that the sender learns from the activations, and their gradients in the same one.

    activation   z = Vᵀ (x − mean − anchor)      decoded as   V z + mean + anchor
    gradient     w = Vᵀ g                        decoded as   V w, the exact adjoint: no second loss

The basis travels inside activations as numbered editions: with the first of training, after 1, 2, 4, … steps
while it is young, then every so many steps. Each message names its edition; each gradient takes that of its
activation. An evaluation before the first edition crosses as bf16.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Self

import torch
from torch import Tensor

from isthmus.codec.base import (
    CodedMessage,
    Coder,
    CoderSite,
    Key,
    Memory,
    Payload,
    State,
    Wrapping,
    below,
    flat_bytes,
    from_bytes,
)
from isthmus.codec.floats import HalfPrecision
from isthmus.codec.integers import MAX_BITS, ColumnCode, IntegerCoder, allot_bits, column_code
from isthmus.errors import FrameError, UserError
from isthmus.job.codec_steps import (
    ANCHOR_GROUP,
    PLAIN_TAG_BYTES,
    TAG_BYTES,
    CodecStep,
    Integers,
    Subspace,
    anchor_bytes,
    num_anchors,
    num_directions,
    num_due,
    shared_bits,
)

_EDITION, _ANCHORS, _LEARNER, _REST = "edition", "anchors", "learner.", "rest."


NUM_SLOTS: Final = 4096
"""Token ids that have an anchor of their own; larger ones share the same slots."""

_MAX_SQUARED_NORM: Final = 1e30
_NUM_SPARE: Final = 8
_NUM_ITERATIONS: Final = 4
_PRIOR_ROWS: Final = 16.0
_PRIOR_ROWS_OF_TOKEN: Final = 4.0
_SPREAD: Final = 2654435761


@dataclass(slots=True, kw_only=True)
class RowMoments:
    """Weighted sums over rows: their number, their sum, and the sum of their outer products."""

    weight: Tensor
    sum_D: Tensor
    outer_DD: Tensor

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> Self:
        """Nothing seen yet."""
        return cls(
            weight=torch.zeros((), device=device),
            sum_D=torch.zeros(width, device=device),
            outer_DD=torch.zeros(width, width, device=device),
        )

    def add(self, y_ND: Tensor) -> None:
        """Take in rows, but for those that are not finite."""
        is_usable_N1 = y_ND.square().sum(dim=1, keepdim=True) < _MAX_SQUARED_NORM
        y_ND = torch.where(is_usable_N1, y_ND, 0)
        self.weight += is_usable_N1.sum()
        self.sum_D += y_ND.sum(dim=0)
        self.outer_DD.addmm_(y_ND.T, y_ND)

    def centre(self) -> Tensor:
        """Measure all rows from their mean from now on; return that mean."""
        shift_D = self.sum_D / self.weight.clamp(min=1)
        self.outer_DD -= torch.outer(shift_D, self.sum_D)
        self.sum_D.zero_()
        return shift_D

    def fade(self, share: float) -> None:
        """Let what was seen count for this share of what it did."""
        for one in (self.weight, self.sum_D, self.outer_DD):
            one *= share


def principal(moments: RowMoments, *, rank: int, start_DR: Tensor | None) -> tuple[Tensor, Tensor]:
    """Orthonormal directions of greatest variance, (width, rank), and the variance along each, largest first.

    Found by subspace iteration from the directions of last time: width² × rank operations, not width³.
    """
    second_DD = moments.outer_DD / moments.weight.clamp(min=1)
    width = len(second_DD)
    guess_DQ = _guess(width, min(rank + _NUM_SPARE, width), start_DR).to(second_DD)
    for _ in range(_NUM_ITERATIONS):
        guess_DQ = torch.linalg.qr(second_DD @ guess_DQ).Q
    variance_Q, turn_QQ = torch.linalg.eigh(guess_DQ.T @ second_DD @ guess_DQ)
    found_R = variance_Q.flip(0)[:rank].clamp(min=0)
    # Where few rows were seen, chance has made some directions too weak and others too strong.
    share = moments.weight / (moments.weight + _PRIOR_ROWS)
    variance_R = share * found_R + (1 - share) * second_DD.diagonal().mean()
    return guess_DQ @ turn_QQ.flip(1)[:, :rank], variance_R


def _guess(width: int, num_columns: int, start_DR: Tensor | None) -> Tensor:
    guess_DQ = torch.randn(width, num_columns, generator=torch.Generator().manual_seed(width))
    if start_DR is not None:
        guess_DQ[:, : start_DR.shape[1]] = start_DR.cpu()
    return guess_DQ


@dataclass(slots=True, kw_only=True)
class TokenSums:
    """Weighted sums of rows by the slot of their token id."""

    weight_S: Tensor
    sum_SD: Tensor

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> Self:
        """Nothing seen yet."""
        return cls(
            weight_S=torch.zeros(NUM_SLOTS, device=device),
            sum_SD=torch.zeros(NUM_SLOTS, width, device=device),
        )

    def add(self, x_ND: Tensor, slot_N: Tensor) -> None:
        """Take in these rows, but for those that are not finite."""
        is_usable_N1 = x_ND.square().sum(dim=1, keepdim=True) < _MAX_SQUARED_NORM
        self.weight_S.index_add_(0, slot_N, is_usable_N1.flatten().to(self.weight_S.dtype))
        self.sum_SD.index_add_(0, slot_N, torch.where(is_usable_N1, x_ND, 0))

    def fade(self, share: float) -> None:
        """Let what was seen count for this share of what it did."""
        self.weight_S *= share
        self.sum_SD *= share

    def best_updates(
        self,
        anchor_SD: Tensor,
        mean_D: Tensor,
        *,
        num_updates: int,
    ) -> tuple[Tensor, Tensor]:
        """The slots where a new anchor helps most, and the new anchors: means less the mean of all.

        The fewer rows an anchor would rest on, the closer it stays to the one in force.
        """
        weight_S1 = self.weight_S.unsqueeze(1)
        surplus_SD = self.sum_SD - weight_S1 * (mean_D + anchor_SD)
        change_SD = surplus_SD / (weight_S1 + _PRIOR_ROWS_OF_TOKEN)
        gain_S = self.weight_S * change_SD.square().sum(dim=1)
        slot_U = gain_S.topk(num_updates).indices
        return slot_U, (anchor_SD + change_SD)[slot_U]


def slots_of(ids_N: Tensor) -> Tensor:
    """The slot of each token id: the id itself while it is small, else one that it shares by a fixed rule."""
    ids_N = ids_N.long()
    return torch.where(ids_N < NUM_SLOTS, ids_N, ids_N * _SPREAD >> 16) % NUM_SLOTS


# Kept as halves, which end at 65504.
_MOST_ANCHOR: Final = 2.0**15
_NUMBER_BYTES: Final = 8
_BYTES: Final = IntegerCoder(Integers(bits=8, group=ANCHOR_GROUP))
# Only stochastic rounding would look at it.
_ANY_MESSAGE: Final = CodedMessage(key=Key(step=0, microbatch=0), seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes that the bytes of an edition follow; `num_bits` are shared out, or None."""

    width: int
    rank: int
    num_anchors: int
    num_bits: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """One edition, as float32 on the device of a cut's end."""

    packed: Tensor
    """On the host."""
    number: int
    mean_D: Tensor
    deviation_R: Tensor
    vectors_DR: Tensor
    slot_U: Tensor
    anchor_UD: Tensor
    tag: Tensor
    code: ColumnCode | None

    @property
    def digest(self) -> bytes:
        """What messages name it by."""
        return tag_bytes(self.packed[:TAG_BYTES])


def tag_bytes(tag: Tensor) -> bytes:
    """The tag of a message, on the host."""
    return tag.cpu().numpy().tobytes()


def pack_edition(
    *,
    number: int,
    mean_D: Tensor,
    deviation_R: Tensor,
    vectors_DR: Tensor,
    slot_U: Tensor,
    anchor_UD: Tensor,
    bits: tuple[int, ...],
) -> Tensor:
    """The bytes of an edition, on the host."""
    content = torch.cat(
        [
            flat_bytes(one.cpu())
            for one in (
                torch.tensor([number], dtype=torch.int64),
                mean_D.to(torch.float32),
                deviation_R.to(torch.float32),
                slot_U.to(torch.int32),
                vectors_DR.to(torch.float16),
                *_BYTES.encode(anchor_UD.cpu().float().clamp(-_MOST_ANCHOR, _MOST_ANCHOR), _ANY_MESSAGE),
                torch.tensor(bits, dtype=torch.uint8),
            )
        ]
    )
    return torch.cat([torch.frombuffer(bytearray(_digest(content)), dtype=torch.uint8), content])


def unpack_edition(packed: Tensor, shapes: Shapes, *, device: torch.device) -> Edition:
    """The edition that the bytes hold; they have the right number."""
    packed = packed.cpu()
    if _digest(packed[TAG_BYTES:]) != tag_bytes(packed[:TAG_BYTES]):
        raise FrameError("a basis that differs from what was sent")
    number, mean, deviations, slots, vectors, anchors, bits = _split(packed, shapes)
    slot_U = from_bytes(slots, torch.int32).long()
    if not bool(((slot_U >= 0) & (slot_U < NUM_SLOTS)).all()):
        raise FrameError("a basis with anchors for token ids that are none")
    deviation_R = from_bytes(deviations, torch.float32).to(device)
    return Edition(
        packed=packed,
        number=int(from_bytes(number, torch.int64)),
        mean_D=from_bytes(mean, torch.float32).to(device),
        deviation_R=deviation_R,
        vectors_DR=_halves(vectors, (shapes.width, shapes.rank)).to(device),
        slot_U=slot_U.to(device),
        anchor_UD=_bytes(anchors, (shapes.num_anchors, shapes.width)).to(device),
        tag=packed[:TAG_BYTES].to(device),
        code=None if shapes.num_bits is None else _code(bits.tolist(), shapes.num_bits, deviation_R),
    )


def _split(packed: Tensor, shapes: Shapes) -> list[Tensor]:
    width, rank, anchors = shapes.width, shapes.rank, shapes.num_anchors
    rows_bytes = (2 * width * rank, anchors * anchor_bytes(width))
    sizes = (_NUMBER_BYTES, 4 * width, 4 * rank, 4 * anchors, *rows_bytes, rank)
    ends = accumulate(sizes, initial=TAG_BYTES)
    return [packed[start:stop] for start, stop in pairwise(ends)]


def _halves(part: Tensor, shape: tuple[int, int]) -> Tensor:
    return from_bytes(part, torch.float16).view(shape).float()


def _bytes(part: Tensor, shape: tuple[int, int]) -> Tensor:
    """On the host, where every end comes to the same numbers."""
    start = part.numel() - math.prod(shape)
    return _BYTES.decode(iter((part[:start], part[start:])), shape, _ANY_MESSAGE)


def _code(bits: list[int], num_bits: int, deviation_R: Tensor) -> ColumnCode:
    if sum(bits) != num_bits or max(bits) > MAX_BITS:
        raise FrameError(f"a basis that shares out {sum(bits)} bits instead of {num_bits}")
    return column_code(bits, deviation_R)


def _digest(content: Tensor) -> bytes:
    return hashlib.blake2b(content.numpy().tobytes(), digest_size=TAG_BYTES).digest()


# What was seen before an edition counts half for the next one, so that the basis follows the training.
_FADING: Final = 0.5
_LEAST_DEVIATION: Final = 1e-8
# Rows of one message that moments are taken from: more would teach little and cost much.
_MAX_ROWS: Final = 128
_STEPS: Final = "steps"


class Learner:
    """Watches the rows of training messages, and issues editions every so many steps."""

    def __init__(self, shapes: Shapes, *, every: int, device: torch.device) -> None:
        self._shapes = shapes
        self._every = every
        self._moments = RowMoments.zeros(shapes.width, device)
        self._tokens = TokenSums.zeros(shapes.width, device) if shapes.num_anchors else None
        self._first_step: int | None = None
        self._last_step = 0

    def observe(
        self,
        x_ND: Tensor,
        y_ND: Tensor,
        slot_N: Tensor | None,
        *,
        seed: int,
    ) -> None:
        """Take in rows, what is left of them without mean and anchors, and the slots of their token ids."""
        # The first edition has nothing else to go by. Where rows are left out, not always the same positions.
        stride = 1 if self._first_step is None else max(1, -(-len(y_ND) // _MAX_ROWS))
        self._moments.add(y_ND[seed % stride :: stride])
        if self._tokens is not None and slot_N is not None:
            self._tokens.add(x_ND, slot_N)

    def is_due(self, step: int) -> bool:
        """Whether this step wants an edition that the steps before have not had."""
        if self._first_step is None:
            return True
        age, last_age = step - self._first_step, self._last_step - self._first_step
        return num_due(age, every=self._every) > num_due(last_age, every=self._every)

    def issue(self, step: int, *, before: Edition | None, anchor_SD: Tensor) -> Tensor:
        """The bytes of the next edition."""
        mean_D = self._moments.centre()
        if before is not None:
            mean_D = mean_D + before.mean_D
        vectors_DR, variance_R = principal(
            self._moments,
            rank=self._shapes.rank,
            start_DR=None if before is None else before.vectors_DR,
        )
        slot_U, anchor_UD = self._anchors(anchor_SD, mean_D)
        self._turn_over(step)
        return pack_edition(
            number=1 if before is None else before.number + 1,
            mean_D=mean_D,
            deviation_R=variance_R.sqrt().clamp(min=_LEAST_DEVIATION),
            vectors_DR=vectors_DR,
            slot_U=slot_U,
            anchor_UD=anchor_UD,
            bits=self._bits(variance_R),
        )

    def state_dict(self) -> State:
        """All that the next edition depends on, besides the last one."""
        steps = torch.tensor([-1 if self._first_step is None else self._first_step, self._last_step])
        return {_STEPS: steps} | {name: one.clone() for name, one in self._sums().items()}

    def load_state_dict(self, state: State) -> None:
        """Go on learning from where the state was taken."""
        first, self._last_step = state[_STEPS].tolist()
        self._first_step = None if first < 0 else first
        for name, own in self._sums().items():
            own.copy_(state[name])

    def _sums(self) -> State:
        moments, tokens = self._moments, self._tokens
        sums = {"weight": moments.weight, "sum": moments.sum_D, "outer": moments.outer_DD}
        if tokens is not None:
            sums |= {"token_weight": tokens.weight_S, "token_sum": tokens.sum_SD}
        return sums

    def _bits(self, variance_R: Tensor) -> tuple[int, ...]:
        if self._shapes.num_bits is None:
            return (0,) * self._shapes.rank
        return allot_bits(variance_R.tolist(), num_bits=self._shapes.num_bits)

    def _anchors(self, anchor_SD: Tensor, mean_D: Tensor) -> tuple[Tensor, Tensor]:
        if self._tokens is None:
            return torch.empty(0, dtype=torch.int32), torch.empty(0, self._shapes.width)
        return self._tokens.best_updates(anchor_SD, mean_D, num_updates=self._shapes.num_anchors)

    def _turn_over(self, step: int) -> None:
        self._moments.fade(_FADING)
        if self._tokens is not None:
            self._tokens.fade(_FADING)
        self._first_step = step if self._first_step is None else self._first_step
        self._last_step = step


class SubspaceCoder:
    """Codes activations; only the end that encodes learns, the other takes what it is sent."""

    def __init__(
        self,
        step: Subspace,
        steps_behind: tuple[CodecStep, ...],
        place: CoderSite,
        *,
        rest: Coder,
    ) -> None:
        integers = shared_bits(steps_behind)
        rank = num_directions(step, place.width)
        self._shapes = Shapes(
            width=place.width,
            rank=rank,
            num_anchors=num_anchors(step),
            num_bits=None if integers is None else rank * integers.bits,
        )
        self._is_stochastic = integers is not None and integers.is_stochastic
        self._every = step.every
        self._device = place.device
        self._memory = place.memory
        self._rest = rest
        self._plain = HalfPrecision(torch.bfloat16)
        self._edition: Edition | None = None
        num_slots = NUM_SLOTS if self._shapes.num_anchors else 0
        self._anchor_SD = torch.zeros(num_slots, place.width, dtype=torch.float16, device=place.device)
        self._learner: Learner | None = None

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """Tag or new edition, then the rows in its basis."""
        x_ND = x_ND.float()
        slot_N = self._slots(message, len(x_ND))
        head = self._learn(x_ND, slot_N, message) if message.learns else None
        edition = self._edition
        if edition is None:
            return (x_ND.new_zeros(PLAIN_TAG_BYTES, dtype=torch.uint8), *self._plain.encode(x_ND, message))
        z_NR = (x_ND - self._expected(slot_N)) @ edition.vectors_DR
        parts = self._encode_rows(z_NR, edition, message)
        self._memory.keep(message, edition.vectors_DR)
        return (edition.tag if head is None else head, *parts)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The rows, after taking in the edition that may come with them."""
        head = next(parts)
        if head.numel() == PLAIN_TAG_BYTES:
            return self._plain.decode(parts, shape, message)
        slot_N = self._slots(message, shape[0])
        edition = self._edition_named(head)
        z_NR = self._decode_rows(parts, shape[0], edition, message)
        self._memory.keep(message, edition.vectors_DR)
        return z_NR @ edition.vectors_DR.T + self._expected(slot_N)

    def state_dict(self) -> State:
        """The edition and the anchors in force, and what the next edition will be made from."""
        state = {_REST + name: one for name, one in self._rest.state_dict().items()}
        if self._edition is not None:
            state |= {_EDITION: self._edition.packed.clone(), _ANCHORS: self._anchor_SD.clone()}
        if self._learner is not None:
            state |= {_LEARNER + name: one for name, one in self._learner.state_dict().items()}
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from a state of an end on the same side."""
        self._rest.load_state_dict(below(_REST, state))
        if _EDITION in state:
            self._edition = unpack_edition(state[_EDITION], self._shapes, device=self._device)
            self._anchor_SD.copy_(state[_ANCHORS])
        learned = below(_LEARNER, state)
        if learned:
            self._learner = self._new_learner()
            self._learner.load_state_dict(learned)

    def _learn(self, x_ND: Tensor, slot_N: Tensor | None, message: CodedMessage) -> Tensor | None:
        """Take in rows; return the bytes of a new edition where one is due."""
        learner = self._learner = self._learner or self._new_learner()
        learner.observe(x_ND, x_ND - self._expected(slot_N), slot_N, seed=message.seed)
        if not learner.is_due(message.key.step):
            return None
        packed = learner.issue(message.key.step, before=self._edition, anchor_SD=self._anchor_SD)
        self._install(unpack_edition(packed, self._shapes, device=self._device))
        return packed.to(self._device)

    def _new_learner(self) -> Learner:
        return Learner(self._shapes, every=self._every, device=self._device)

    def _edition_named(self, head: Tensor) -> Edition:
        own = self._edition
        if own is not None and tag_bytes(head[:TAG_BYTES]) == own.digest:
            return own
        held = 0 if own is None else own.number
        if head.numel() == TAG_BYTES:
            raise FrameError(f"a message in another basis than edition {held}, which this end holds")
        edition = unpack_edition(head, self._shapes, device=self._device)
        if edition.number != held + 1:
            raise FrameError(f"edition {edition.number} of a basis after edition {held}")
        self._install(edition)
        return edition

    def _install(self, edition: Edition) -> None:
        self._anchor_SD[edition.slot_U] = edition.anchor_UD.half()
        self._edition = edition

    def _expected(self, slot_N: Tensor | None) -> Tensor:
        """What a row is taken to be before it is seen: the mean of all, or that of its token."""
        mean_D = self._anchor_SD.new_zeros((), dtype=torch.float32)
        if self._edition is not None:
            mean_D = self._edition.mean_D
        return mean_D if slot_N is None else mean_D + self._anchor_SD[slot_N].float()

    def _slots(self, message: CodedMessage, num_rows: int) -> Tensor | None:
        if not self._shapes.num_anchors:
            return None
        if message.ids_N is None:
            raise UserError(
                "subspace(…, anchor=tokens) needs the token ids at both ends, and none cross this cut",
                hint="leave anchor=tokens out of the link's codec",
            )
        if message.ids_N.shape != (num_rows,):
            raise FrameError(f"token ids of shape {tuple(message.ids_N.shape)} for {num_rows} rows")
        return slots_of(message.ids_N.to(self._device))

    def _encode_rows(self, z_NR: Tensor, edition: Edition, message: CodedMessage) -> Payload:
        if edition.code is None:
            return self._rest.encode(z_NR, message)
        noise_NR = None
        if self._is_stochastic:
            generator = message.generator(z_NR.device)
            noise_NR = torch.rand(z_NR.shape, generator=generator, device=z_NR.device)
        return (edition.code.encode(z_NR / edition.deviation_R, noise_NR),)

    def _decode_rows(
        self, parts: Iterator[Tensor], num_rows: int, edition: Edition, message: CodedMessage
    ) -> Tensor:
        if edition.code is None:
            return self._rest.decode(parts, (num_rows, self._shapes.rank), message)
        return edition.code.decode(next(parts), num_rows=num_rows) * edition.deviation_R


class SubspaceGradientCoder(Wrapping):
    """Codes gradients in the basis that their activation crossed in."""

    def __init__(self, *, memory: Memory, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._memory = memory

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The gradient of the coordinates."""
        return self._rest.encode(x_ND.float() @ self._memory.find(message), message)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The gradient of the rows."""
        vectors_DR = self._memory.find(message)
        return self._rest.decode(parts, (shape[0], vectors_DR.shape[1]), message) @ vectors_DR.T
