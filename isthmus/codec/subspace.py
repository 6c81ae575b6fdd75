"""The codec `subspace`: a bottleneck that is fitted to what crosses instead of being trained.

    activation   z = Vᵀ (x − mean − anchor[id])      decoded as   V z + mean + anchor[id]
    gradient     w = Vᵀ g                            decoded as   V w, the exact adjoint: no second loss

The sender observes activations as that of a trained bottleneck does, and fits mean, anchors and axes to them
again and again: with the first message of training, after 1, 2, 4, … steps, then every so many. The bytes of
each fit, a basis version, travel inside an activation, and both ends compute with what these bytes say. Every
message names its version; a gradient takes that of its activation. An evaluation before the first version
crosses as bf16.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

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
    WrappingCoder,
    flat_bytes,
    from_bytes,
)
from isthmus.codec.formats import HalfPrecision, IntegerCoder
from isthmus.codec.observed import Observed, TokenMeans, refined_axes
from isthmus.errors import FrameError, UserError
from isthmus.job.codec_steps import (
    ANCHOR_GROUP,
    NUM_ANCHOR_SLOTS,
    PLAIN_TAG_BYTES,
    TAG_BYTES,
    Integers,
    Subspace,
    basis_part_bytes,
    num_anchors,
    num_directions,
    num_due,
)

# Anchors are kept as halves, which end at 65504.
_MOST_ANCHOR: Final = 2.0**15
_ANCHOR_FORMAT: Final = IntegerCoder(Integers(bits=8, group=ANCHOR_GROUP))
# Only stochastic rounding would look at it.
_ANY_MESSAGE: Final = CodedMessage(key=Key(step=0, microbatch=0), seed=0)
# Rows of one message that are observed: more would teach little and cost much.
_MAX_OBSERVED_ROWS: Final = 256
# What was seen before a version counts half for the next one, so that the basis follows the training.
_FADING: Final = 0.5
_HASH_FACTOR: Final = 2654435761
_OBSERVED: Final = "observed."


@dataclass(frozen=True, slots=True, kw_only=True)
class BasisVersion:
    """What both ends compute with; the tag is a digest of this version and all before it."""

    tag: bytes
    mean_D: Tensor
    vectors_DR: Tensor


def slots_of(ids_N: Tensor) -> Tensor:
    """The anchor of each token id: its own while the id is small, else one that it shares by a fixed rule."""
    ids_N = ids_N.long()
    hashed_N = ids_N * _HASH_FACTOR >> 16
    return torch.where(ids_N < NUM_ANCHOR_SLOTS, ids_N, hashed_N) % NUM_ANCHOR_SLOTS


class SubspaceCoder(WrappingCoder):
    """Codes activations; only the end that encodes fits, the other takes what it is sent."""

    def __init__(self, step: Subspace, site: CoderSite, *, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._step = step
        self._site = site
        self._rank = num_directions(step, site.width)
        self._plain = HalfPrecision(torch.bfloat16)
        self._version: BasisVersion | None = None
        num_slots = NUM_ANCHOR_SLOTS if num_anchors(step) else 0
        self._anchor_SD = torch.zeros(num_slots, site.width, dtype=torch.float16, device=site.device)
        self._observed: Observed | None = None
        self._first_step = self._last_step = -1

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """Tag or new version, then the rows in its basis."""
        slot_N = self._slots(message, len(x_ND))
        head = self._learn(x_ND, slot_N, message) if message.learns else None
        version = self._version
        if version is None:
            return (x_ND.new_zeros(PLAIN_TAG_BYTES, dtype=torch.uint8), *self._plain.encode(x_ND, message))
        head = _bytes_of(version.tag) if head is None else head
        self._site.memory.keep(message, version.vectors_DR)
        z_NR = (x_ND - self._expected(version, slot_N)) @ version.vectors_DR
        return (head.to(x_ND.device), *self._rest.encode(z_NR, message))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The rows, after taking in the version that may come with them."""
        head = next(parts)
        if head.numel() == PLAIN_TAG_BYTES:
            return self._plain.decode(parts, shape, message)
        slot_N = self._slots(message, shape[0])
        version = self._version_named(head.cpu())
        self._site.memory.keep(message, version.vectors_DR)
        z_NR = self._rest.decode(parts, (shape[0], self._rank), message)
        return z_NR @ version.vectors_DR.T + self._expected(version, slot_N)

    def state_dict(self) -> State:
        """The version and the anchors in force, and what the next version will be made from."""
        state = self._rest.state_dict()
        if self._version is not None:
            version = self._version
            state |= {"tag": _bytes_of(version.tag), "mean": version.mean_D.clone()}
            state |= {"vectors": version.vectors_DR.half(), "anchors": self._anchor_SD.clone()}
        if self._observed is not None:
            state["steps"] = torch.tensor([self._first_step, self._last_step])
            state |= {_OBSERVED + name: one.clone() for name, one in self._observed.state_dict().items()}
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that was taken at an end of the same side."""
        state = dict(state)
        observed = {name: state.pop(name) for name in list(state) if name.startswith(_OBSERVED)}
        if observed:
            self._first_step, self._last_step = state.pop("steps").tolist()
            self._observed = self._new_observed()
            self._observed.load_state_dict(
                {name.removeprefix(_OBSERVED): one for name, one in observed.items()}
            )
        if "tag" in state:
            self._anchor_SD.copy_(state.pop("anchors"))
            self._version = BasisVersion(
                tag=state.pop("tag").cpu().numpy().tobytes(),
                mean_D=state.pop("mean").to(self._site.device),
                vectors_DR=state.pop("vectors").to(self._site.device).float(),
            )
        self._rest.load_state_dict(state)

    def _learn(self, x_ND: Tensor, slot_N: Tensor | None, message: CodedMessage) -> Tensor | None:
        """Observe rows; return the bytes of a new version where one is due."""
        observed = self._observed = self._observed or self._new_observed()
        # The first version has nothing else to go by. Where rows are left out, not always the same positions.
        stride = 1 if self._version is None else max(1, -(-len(x_ND) // _MAX_OBSERVED_ROWS))
        rows_N = torch.arange(message.seed % stride, len(x_ND), stride, device=x_ND.device)
        slot_N = None if slot_N is None else slot_N[rows_N]
        known_ND = None if self._version is None else self._expected(self._version, slot_N)
        observed.add(x_ND[rows_N], rows_N if slot_N is None else slot_N, known_ND=known_ND)
        if not self._is_due(message.key.step):
            return None
        packed = self._fit(observed)
        self._install(packed)
        return packed

    def _is_due(self, step: int) -> bool:
        """Whether this step wants a version that the steps before have not had."""
        first, last = self._first_step, self._last_step
        every = self._step.every
        is_due = first < 0 or num_due(step - first, every=every) > num_due(last - first, every=every)
        if is_due:
            self._first_step, self._last_step = step if first < 0 else first, step
        return is_due

    @torch.no_grad()
    def _fit(self, observed: Observed) -> Tensor:
        """The bytes of the next version, on the host."""
        mean_D = observed.mean_D
        slot_U, anchor_UD = self._new_anchors(observed.tokens, mean_D)
        start_DR = None if self._version is None else self._version.vectors_DR
        axes_DR = refined_axes(observed.covariance(), rank=self._rank, start_DR=start_DR)
        observed.fade(_FADING)
        # Coordinates that share a scale should be of one size, and those along principal axes are not.
        mixed_DR = axes_DR @ _random_rotation(self._rank).to(axes_DR)
        anchors = _ANCHOR_FORMAT.encode(anchor_UD.clamp(-_MOST_ANCHOR, _MOST_ANCHOR).cpu(), _ANY_MESSAGE)
        tensors = (mean_D, mixed_DR.half(), slot_U.int(), *anchors)
        content = torch.cat([flat_bytes(one.cpu()) for one in tensors])
        return torch.cat([_bytes_of(self._tag_after(content)), content])

    def _new_anchors(self, tokens: TokenMeans | None, mean_D: Tensor) -> tuple[Tensor, Tensor]:
        """The slots where a new anchor helps most, and the new anchors."""
        slots_S = torch.arange(len(self._anchor_SD), device=mean_D.device)
        if tokens is None:
            return slots_S, mean_D.new_empty(0, len(mean_D))
        wanted_SD = tokens.deviations_of(slots_S, mean_D)
        gain_S = tokens.weight_of(slots_S) * (wanted_SD - self._anchor_SD).square().sum(dim=1)
        slot_U = gain_S.topk(num_anchors(self._step)).indices
        return slot_U, wanted_SD[slot_U]

    def _version_named(self, head: Tensor) -> BasisVersion:
        tag = head[:TAG_BYTES].numpy().tobytes()
        if self._version is not None and tag == self._version.tag:
            return self._version
        if head.numel() == TAG_BYTES:
            raise FrameError("a message in a basis version that this end does not have")
        if tag != self._tag_after(head[TAG_BYTES:]):
            raise FrameError(
                "a basis version that differs from what was sent, or follows one that is missing"
            )
        return self._install(head)

    def _install(self, packed: Tensor) -> BasisVersion:
        width, anchors = self._site.width, num_anchors(self._step)
        sizes = basis_part_bytes(self._step, width)
        tag, mean, vectors, slots, scales, codes = torch.split(packed, [TAG_BYTES, *sizes])
        slot_U = from_bytes(slots, torch.int32).long()
        if not bool(((slot_U >= 0) & (slot_U < NUM_ANCHOR_SLOTS)).all()):
            raise FrameError("a basis version with anchors for token ids that are none")
        # On the host, where every end comes to the same numbers.
        anchor_UD = _ANCHOR_FORMAT.decode(iter((scales, codes)), (anchors, width), _ANY_MESSAGE)
        device = self._site.device
        self._anchor_SD[slot_U.to(device)] = anchor_UD.half().to(device)
        self._version = BasisVersion(
            tag=tag.numpy().tobytes(),
            mean_D=from_bytes(mean, torch.float32).to(device),
            vectors_DR=from_bytes(vectors, torch.float16).view(width, self._rank).to(device).float(),
        )
        return self._version

    def _tag_after(self, content: Tensor) -> bytes:
        """Names a version by its bytes and all versions before it."""
        before = b"" if self._version is None else self._version.tag
        return hashlib.blake2b(before + content.numpy().tobytes(), digest_size=TAG_BYTES).digest()

    def _new_observed(self) -> Observed:
        width, num_slots = self._site.width, len(self._anchor_SD)
        tokens = None
        if num_slots:
            tokens = TokenMeans(vocabulary_size=num_slots, num_rows=num_slots, width=width)
        return Observed(width=width, tokens=tokens).to(self._site.device)

    def _expected(self, version: BasisVersion, slot_N: Tensor | None) -> Tensor:
        """What a row is taken to be before it is seen: the mean of all, or that of its token."""
        return version.mean_D if slot_N is None else version.mean_D + self._anchor_SD[slot_N].float()

    def _slots(self, message: CodedMessage, num_rows: int) -> Tensor | None:
        if not num_anchors(self._step):
            return None
        if message.ids_N is None:
            raise UserError(
                "subspace(…, anchor=tokens) needs the token ids at both ends, and none cross this cut",
                hint="leave anchor=tokens out of the link's codec",
            )
        if message.ids_N.shape != (num_rows,):
            raise FrameError(f"token ids of shape {tuple(message.ids_N.shape)} for {num_rows} rows")
        return slots_of(message.ids_N.to(self._site.device))


class SubspaceGradientCoder(WrappingCoder):
    """Codes gradients in the basis that their activation crossed in."""

    def __init__(self, *, memory: Memory, rest: Coder) -> None:
        super().__init__(rest=rest)
        self._memory = memory

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The gradient of the coordinates."""
        return self._rest.encode(x_ND @ self._memory.find(message), message)

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The gradient of the rows."""
        vectors_DR = self._memory.find(message)
        return self._rest.decode(parts, (shape[0], vectors_DR.shape[1]), message) @ vectors_DR.T


def _random_rotation(size: int) -> Tensor:
    rotation: Tensor = torch.linalg.qr(
        torch.randn(size, size, generator=torch.Generator().manual_seed(size))
    ).Q
    return rotation


def _bytes_of(tag: bytes) -> Tensor:
    return torch.frombuffer(bytearray(tag), dtype=torch.uint8)
