"""Low-rank crossing: what its sender observes of hidden states, the axes that fit them, the codec `subspace`.

A trained bottleneck starts from these figures. `subspace` is a bottleneck that is not trained, but fitted to
what crosses again and again: with the first message of training, after 1, 2, 4, … steps, then every so many.

    activation   z = Vᵀ (x − mean − anchor[id])      decoded as   V z + mean + anchor[id]
    gradient     w = Vᵀ g                            decoded as   V w, the exact adjoint: no second loss

The bytes of each fit, a basis version, travel inside an activation, and both ends compute with what these
bytes say. Every message names its version; a gradient takes that of its activation. An evaluation before the
first version crosses as bf16.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from isthmus.codec.base import (
    CodedMessage,
    Coder,
    CoderSite,
    Key,
    Payload,
    State,
    WrappingCoder,
    flat_bytes,
    from_bytes,
)
from isthmus.codec.formats import FloatCoder, IntegerCoder
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

# An id's mean is drawn to the mean of all by so many tokens: one that came once is not taken at its word.
_PRIOR_TOKENS: Final = 1.0
# Hidden states drift while a model learns, so only this many of the latest count.
_TOKENS_PER_ID: Final = 256.0
_TOKENS_PER_DIMENSION: Final = 64.0
# Beyond it sums over tokens would not be finite.
_MAX_SQUARED_NORM: Final = 1e30
_NUM_SPARE_AXES: Final = 8
_NUM_ITERATIONS: Final = 4

AllReduce = Callable[[Tensor], None]
"""Sums a tensor over all ranks of a cloud, in place; all of them call it, in one order."""


class TokenMeans(nn.Module):
    """Sums by token id, for the first `num_rows` ids that come: of a large vocabulary, the frequent ones."""

    row_of_V: Tensor
    weight_K: Tensor
    sum_KD: Tensor
    num_K: Tensor

    def __init__(self, *, vocabulary_size: int, num_rows: int, width: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        # The last row is of no id: those that have none are counted there, and their sum stays zero.
        self.register_buffer("row_of_V", torch.full((vocabulary_size,), num_rows))
        self.register_buffer("weight_K", torch.zeros(num_rows + 1))
        self.register_buffer("sum_KD", torch.zeros(num_rows + 1, width))
        self.register_buffer("num_K", torch.zeros(num_rows + 1))

    def add(self, h_ND: Tensor, ids_N: Tensor, weights_N: Tensor) -> None:
        """Count hidden states in, and give ids that are new a row while there are any."""
        self._give_rows(ids_N, weights_N)
        rows_N = self.row_of_V[ids_N]
        self.num_K.index_add_(0, rows_N, weights_N)
        weights_N = weights_N * (rows_N < self._num_rows)
        self.weight_K.index_add_(0, rows_N, weights_N)
        self.sum_KD.index_add_(0, rows_N, h_ND * weights_N[:, None])
        keep_N = _keep(self.weight_K[rows_N], _TOKENS_PER_ID)
        # An id that comes several times writes the same values each time.
        self.sum_KD[rows_N] = self.sum_KD[rows_N] * keep_N[:, None]
        self.weight_K[rows_N] = self.weight_K[rows_N] * keep_N

    def weight_of(self, ids_N: Tensor) -> Tensor:
        """How many tokens of each id count."""
        return self.weight_K[self.row_of_V[ids_N]]

    def deviations_of(self, ids_N: Tensor, mean_D: Tensor) -> Tensor:
        """How far the mean of each id lies from the mean of all; of shape (ids, width)."""
        rows_N = self.row_of_V[ids_N]
        return _deviations(self.sum_KD[rows_N], self.weight_K[rows_N], mean_D)

    def covariance(self, mean_D: Tensor) -> Tensor:
        """How the means of ids vary around the mean of all, each as often as it came."""
        off_KD = _deviations(self.sum_KD, self.weight_K, mean_D)
        return (off_KD * self.num_K[:, None]).T @ off_KD / self.num_K.sum().clamp(min=1.0)

    def pool(self, all_reduce: AllReduce) -> None:
        """Count in what all ranks have seen; where rows are too few, the most frequent ids get them."""
        num_V = torch.where(self.row_of_V < self._num_rows, self.num_K[self.row_of_V], 0.0)
        num_all = self.num_K.sum()
        for one in (num_V, num_all):
            all_reduce(one)
        ids_N = num_V.argsort(descending=True, stable=True)[: min(self._num_rows, int((num_V > 0).sum()))]
        for one in (self.weight_K, self.sum_KD):
            own_N = one[self.row_of_V[ids_N]]
            one.zero_()[: len(ids_N)] = own_N
            all_reduce(one)
        self.num_K.zero_()[: len(ids_N)] = num_V[ids_N]
        self.num_K[-1] = num_all - num_V[ids_N].sum()
        self.row_of_V.fill_(self._num_rows)[ids_N] = torch.arange(len(ids_N), device=ids_N.device)

    def _give_rows(self, ids_N: Tensor, weights_N: Tensor) -> None:
        came_V = torch.zeros_like(self.row_of_V).index_add_(0, ids_N, (weights_N > 0).to(self.row_of_V.dtype))
        is_new_V = (came_V > 0) & (self.row_of_V == self._num_rows)
        num_given = (self.row_of_V < self._num_rows).sum()
        next_V = (num_given + is_new_V.cumsum(0) - 1).clamp(max=self._num_rows)
        self.row_of_V.copy_(torch.where(is_new_V, next_V, self.row_of_V))


class Observed(nn.Module):
    """The mean of hidden states, and their scatter around what both ends will know of them beforehand."""

    weight: Tensor
    mean_D: Tensor
    scatter_weight: Tensor
    scatter_DD: Tensor
    spread: Tensor

    def __init__(self, *, width: int, tokens: TokenMeans | None) -> None:
        super().__init__()
        self._max_weight = _TOKENS_PER_DIMENSION * width
        self.tokens = tokens
        self.register_buffer("weight", torch.zeros(()))
        self.register_buffer("mean_D", torch.zeros(width))
        self.register_buffer("scatter_weight", torch.zeros(()))
        self.register_buffer("scatter_DD", torch.zeros(width, width))
        self.register_buffer("spread", torch.zeros(()))

    @torch.no_grad()
    def add(
        self,
        h_BTD: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor | None = None,
        *,
        known_ND: Tensor | None = None,
    ) -> None:
        """Count in the hidden states of a micro-batch, less its padding and rows that are not finite.

        The scatter is taken around what is known of each row, where that is given, else around the means so
        far.
        """
        h_ND = h_BTD.detach().float().flatten(0, -2)
        ids_N = ids_BT.flatten()
        is_usable_N = h_ND.square().sum(-1) < _MAX_SQUARED_NORM
        weights_N = is_usable_N.float()
        if mask_BT is not None:
            weights_N = weights_N * (mask_BT.flatten() != 0)
        h_ND = torch.where(is_usable_N[:, None], h_ND, 0.0)
        with torch.autocast(h_ND.device.type, enabled=False):
            self._add_mean(h_ND, weights_N)
            if self.tokens is not None:
                self.tokens.add(h_ND, ids_N, weights_N)
            off_ND = self._surprise(h_ND, ids_N) if known_ND is None else h_ND - known_ND
            self._add_scatter(off_ND, h_ND, weights_N)

    @torch.no_grad()
    def pool(self, all_reduce: AllReduce) -> None:
        """Count in what all ranks have seen; all of them have the same then, and none observes any more."""
        own_D, sum_D = self.mean_D.clone(), self.mean_D * self.weight
        for one in (sum_D, self.weight):
            all_reduce(one)
        self.mean_D.copy_(sum_D / self.weight.clamp(min=1.0))
        off_D = own_D - self.mean_D
        self.spread.add_(self.scatter_weight * off_D.square().sum())
        if self.tokens is None:
            # By token id, a surprise is measured from the mean of its id, wherever that of all lies.
            self.scatter_DD.add_(self.scatter_weight * off_D.outer(off_D))
        else:
            self.tokens.pool(all_reduce)
        for one in (self.spread, self.scatter_DD, self.scatter_weight):
            all_reduce(one)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been counted in."""
        return float(self.weight) == 0

    def fade(self, share: Tensor | float) -> None:
        """Let the scatter so far count for this share of what it did."""
        for one in (self.scatter_DD, self.spread, self.scatter_weight):
            one.mul_(share)

    def covariance(self) -> Tensor:
        """How hidden states vary around what is known beforehand."""
        return self.scatter_DD / self.scatter_weight.clamp(min=1.0)

    def variance(self) -> Tensor:
        """How far hidden states lie from the mean of all, squared."""
        return self.spread / self.scatter_weight.clamp(min=1.0)

    def _add_mean(self, h_ND: Tensor, weights_N: Tensor) -> None:
        added = weights_N.sum()
        self.weight.add_(added)
        off_D = ((h_ND - self.mean_D) * weights_N[:, None]).sum(0)
        self.mean_D.add_(off_D / self.weight.clamp(min=1.0))
        self.weight.mul_(_keep(self.weight, self._max_weight))

    def _add_scatter(self, x_ND: Tensor, h_ND: Tensor, weights_N: Tensor) -> None:
        self.scatter_DD.addmm_((x_ND * weights_N[:, None]).T, x_ND)
        self.spread.add_(((h_ND - self.mean_D).square().sum(-1) * weights_N).sum())
        self.scatter_weight.add_(weights_N.sum())
        self.fade(_keep(self.scatter_weight, self._max_weight))

    def _surprise(self, h_ND: Tensor, ids_N: Tensor) -> Tensor:
        """Hidden states less what all others say of them: a token's own part of its id's mean is taken out.

        Otherwise ids that came once would seem to be foreseen.
        """
        off_ND = h_ND - self.mean_D
        if self.tokens is None:
            return off_ND
        num_N = self.tokens.weight_of(ids_N)
        factor_N = (num_N + _PRIOR_TOKENS) / (num_N + _PRIOR_TOKENS - (num_N > 0).float())
        return (off_ND - self.tokens.deviations_of(ids_N, self.mean_D)) * factor_N[:, None]


def principal_axes(covariance_DD: Tensor, *, rank: int) -> Tensor:
    """Orthonormal directions of most variance, the first one first; of shape (width, rank)."""
    # On the host: not every accelerator decomposes matrices, and this happens once in a run.
    axes_DD: Tensor = torch.linalg.eigh(covariance_DD.to("cpu", torch.float64)).eigenvectors
    return axes_DD.flip(-1)[:, :rank].to(covariance_DD)


def refined_axes(covariance_DD: Tensor, *, rank: int, start_DR: Tensor | None) -> Tensor:
    """The same directions by subspace iteration from those of last time.

    Takes width² × rank operations instead of width³, so it may happen often.
    """
    width = len(covariance_DD)
    generator = torch.Generator().manual_seed(width)
    axes_DQ = torch.randn(width, min(rank + _NUM_SPARE_AXES, width), generator=generator)
    axes_DQ = axes_DQ.to(covariance_DD)
    if start_DR is not None:
        axes_DQ[:, : start_DR.shape[1]] = start_DR
    for _ in range(_NUM_ITERATIONS):
        axes_DQ = torch.linalg.qr(covariance_DD @ axes_DQ).Q
    turn_QQ = torch.linalg.eigh(axes_DQ.T @ covariance_DD @ axes_DQ).eigenvectors
    axes_DR: Tensor = axes_DQ @ turn_QQ.flip(1)[:, :rank]
    return axes_DR


def _deviations(sum_KD: Tensor, weight_K: Tensor, mean_D: Tensor) -> Tensor:
    return (sum_KD - weight_K[:, None] * mean_D) / (weight_K[:, None] + _PRIOR_TOKENS)


def _keep(weight: Tensor, most: float) -> Tensor:
    """The share of old tokens that still count, where no more than so many may."""
    return most / weight.clamp(min=most)


# The codec `subspace`.

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
        self._plain = FloatCoder(torch.bfloat16)
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


def _random_rotation(size: int) -> Tensor:
    rotation: Tensor = torch.linalg.qr(
        torch.randn(size, size, generator=torch.Generator().manual_seed(size))
    ).Q
    return rotation


def _bytes_of(tag: bytes) -> Tensor:
    return torch.frombuffer(bytearray(tag), dtype=torch.uint8)
