"""Rows in a subspace that the sender learns from the activations, and their gradients in the same one.

    activation   z = Vᵀ (x − mean − anchor)      decoded as   V z + mean + anchor
    gradient     w = Vᵀ g                        decoded as   V w, the exact adjoint: no second loss

The basis travels inside activations as numbered editions: with the first of training, after 1, 2, 4, … steps
while it is young, then every so many steps. Each message names its edition; each gradient takes that of its
activation. An evaluation before the first edition crosses as bf16.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus.codec.base import Coder, Memory, Message, Payload, Place, State, Wrapping, below
from isthmus.codec.casts import Half
from isthmus.codec.edition import Edition, Shapes, tag_bytes, unpack_edition
from isthmus.codec.learner import Learner
from isthmus.codec.moments import NUM_SLOTS, slots_of
from isthmus.errors import FrameError, UserError
from isthmus.job.codec_steps import CodecStep, Subspace
from isthmus.job.subspace_sizes import PLAIN_TAG_BYTES, TAG_BYTES, num_anchors, num_directions, shared_bits

_EDITION, _ANCHORS, _LEARNER, _REST = "edition", "anchors", "learner.", "rest."


class SubspaceCoder:
    """Codes activations; only the end that encodes learns, the other takes what it is sent."""

    def __init__(
        self,
        step: Subspace,
        steps_behind: tuple[CodecStep, ...],
        place: Place,
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
        self._plain = Half(torch.bfloat16)
        self._edition: Edition | None = None
        num_slots = NUM_SLOTS if self._shapes.num_anchors else 0
        self._anchor_SD = torch.zeros(num_slots, place.width, dtype=torch.float16, device=place.device)
        self._learner: Learner | None = None

    def encode(self, x_ND: Tensor, message: Message) -> Payload:
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

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: Message) -> Tensor:
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

    def _learn(self, x_ND: Tensor, slot_N: Tensor | None, message: Message) -> Tensor | None:
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

    def _slots(self, message: Message, num_rows: int) -> Tensor | None:
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

    def _encode_rows(self, z_NR: Tensor, edition: Edition, message: Message) -> Payload:
        if edition.code is None:
            return self._rest.encode(z_NR, message)
        noise_NR = None
        if self._is_stochastic:
            generator = message.generator(z_NR.device)
            noise_NR = torch.rand(z_NR.shape, generator=generator, device=z_NR.device)
        return (edition.code.encode(z_NR / edition.deviation_R, noise_NR),)

    def _decode_rows(
        self, parts: Iterator[Tensor], num_rows: int, edition: Edition, message: Message
    ) -> Tensor:
        if edition.code is None:
            return self._rest.decode(parts, (num_rows, self._shapes.rank), message)
        return edition.code.decode(next(parts), num_rows=num_rows) * edition.deviation_R


class SubspaceGradientCoder(Wrapping):
    """Codes gradients in the basis that their activation crossed in."""

    def __init__(self, *, memory: Memory, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._memory = memory

    def encode(self, x_ND: Tensor, message: Message) -> Payload:
        """The gradient of the coordinates."""
        return self._rest.encode(x_ND.float() @ self._memory.find(message), message)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: Message) -> Tensor:
        """The gradient of the rows."""
        vectors_DR = self._memory.find(message)
        return self._rest.decode(parts, (shape[0], vectors_DR.shape[1]), message) @ vectors_DR.T
