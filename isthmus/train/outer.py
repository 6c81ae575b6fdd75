"""The outer parameters of data parallel, on the host: the same bits at every cloud after every round.

Each fragment is one matrix of rows of 4096 elements, filled up with zeros, so that shards are rows and every
codec works on rows. What makes new outer parameters of a round is elementwise arithmetic in float32, with
separate multiplications and additions, so that processors of any kind give the same bits:

    streaming   m ← μ·m + Δ,   θ ← θ − η·(Δ + μ·m)        Δ = outer − local, the mean over tokens
    sparse      θ ← θ − η·Δ                               Δ of the few largest elements, with error feedback
    exact       AdamW, clipped                            Δ is the gradient of one step of all clouds
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from isthmus.codec.base import Key, Payload, flat_bytes
from isthmus.codec.chain import CodecEnd, Codecs
from isthmus.errors import FrameError
from isthmus.job.codec import parse_codec
from isthmus.model.blueprint import ParameterLayout
from isthmus.plan.codecs import RAW
from isthmus.plan.membership import fragment_layers
from isthmus.plan.types import Facts
from isthmus.train.optimizer import Schedule

WIDTH: Final = 4096
_BETAS: Final = (0.9, 0.95)
_EPSILON: Final = 1e-8
_NORM_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterRule(Facts):
    """How a round changes the outer parameters, and the local ones after it."""

    sync: Literal["exact", "streaming", "sparse"]
    codec: Annotated[str, Field(max_length=256)]
    """What deltas are coded by."""
    learning_rate: float = 1.0
    momentum: float = 0.0
    mixing: float = 0.0
    """The share of the local parameters that stays when a round is mixed in."""
    feedback: float = 0.0
    """The share of what coding has lost that is added to the next delta."""

    @property
    def gathers(self) -> bool:
        """Whether every cloud gets all deltas and sums them alike."""
        return self.sync == "sparse"

    @property
    def num_moments(self) -> int:
        """Matrices beside the parameters of a fragment: momentum, or both moments of AdamW."""
        return {"exact": 2, "streaming": 1, "sparse": 0}[self.sync]


class Fragment:
    """Some of a model's parameters as one matrix on the host."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        sizes = [one.numel() for one in parameters.values()]
        self.num_elements = sum(sizes)
        self.num_rows = -(-self.num_elements // WIDTH)
        self._sizes = [*sizes, self.num_rows * WIDTH - self.num_elements]

    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors in the order of the parameters, as a matrix where they are."""
        flat = [one.detach().flatten().to(torch.float32) for one in tensors]
        padding = flat[0].new_zeros(self._sizes[-1])
        return torch.cat([*flat, padding]).view(self.num_rows, WIDTH)

    def local(self) -> Tensor:
        """The parameters as they are now."""
        return self.matrix(list(self.parameters.values()))

    def gradient(self) -> Tensor:
        """Their gradients; zeros where there is none."""
        every = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters.values()]
        return self.matrix(every)

    def pieces(self, matrix: Tensor) -> dict[str, Tensor]:
        """Views of a matrix by the names of the parameters."""
        flat = torch.split(matrix.view(-1), self._sizes)
        return {
            name: one.view(like.shape)
            for (name, like), one in zip(self.parameters.items(), flat[:-1], strict=True)
        }

    def set(self, matrix: Tensor) -> None:
        """Give the parameters the values of a matrix."""
        for name, value in self.pieces(matrix).items():
            self.parameters[name].copy_(value)

    def shard_rows(self, shard: int, num_shards: int) -> range:
        """The rows of one of so many shards."""
        return range(self.num_rows * shard // num_shards, self.num_rows * (shard + 1) // num_shards)


def make_fragments(
    parameters: Mapping[str, Tensor], layout: ParameterLayout, num_fragments: int
) -> tuple[Fragment, ...]:
    """Embeddings, every so-many-th layer, and the head, each in one of so many fragments."""
    fragment_of = fragment_layers(layout.num_layers, num_fragments)
    places: dict[str, int] = dict.fromkeys(layout.last, num_fragments - 1)
    for layer, names in enumerate(layout.layers):
        places |= dict.fromkeys(names, fragment_of[layer])
    # What embeddings and head share is with the embeddings.
    places |= dict.fromkeys(layout.first, 0)
    found: list[dict[str, Tensor]] = [{} for _ in range(num_fragments)]
    for name, parameter in parameters.items():
        found[places[name]][name] = parameter
    empty = [number for number, one in enumerate(found) if not one]
    if empty:
        raise ValueError(f"fragments {empty} of {num_fragments} hold nothing")
    return tuple(map(Fragment, found))


class Outer:
    """The outer parameters and moments of all fragments, and what codes deltas of them.

    The computing thread and the host's read and write them in turn, under one lock.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        rule: OuterRule,
        *,
        schedule: Schedule,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        seed: int = 0,
        sharded: Callable[[str, Tensor], Tensor] = lambda _, one: one,
        share: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        self._sharded = sharded
        self.share = share
        """Completes parameters of which this rank has changed its part, and other ranks theirs."""
        self.fragments = tuple(fragments)
        self.rule = rule
        self.values = [one.local().cpu().clone() for one in fragments]
        self.moments = [[torch.zeros_like(one) for _ in range(rule.num_moments)] for one in self.values]
        self.shifts = [torch.zeros_like(one) for one in self.values] if rule.sync == "sparse" else []
        """What rounds have changed since they were mixed last; the local parameters keep their own steps."""
        self.residuals = [torch.zeros_like(one) for one in self.values] if rule.feedback else []
        self.lock = threading.Lock()
        self._schedule = schedule
        self._weight_decay = weight_decay
        self._max_norm = max_norm
        delta = parse_codec(rule.codec)
        self._delta_codecs = Codecs(forward=delta, backward=RAW, width=WIDTH, seed=seed)
        total = RAW if rule.gathers else delta
        self._sum_codecs = Codecs(forward=total, backward=RAW, width=WIDTH, seed=seed + 1)
        self._encoders = [self._end(one.parameters) for one in self.fragments]
        self._decoder = CodecEnd(self._delta_codecs, device=torch.device("cpu"))
        self._summer = CodecEnd(self._sum_codecs, device=torch.device("cpu"))

    def _end(self, parameters: Mapping[str, Tensor]) -> CodecEnd:
        return CodecEnd(self._delta_codecs, device=next(iter(parameters.values())).device)

    # Coding.

    def encode(self, number: int, cloud: int, delta: Tensor) -> Payload:
        """The delta of a round, coded once for all; with feedback the next one has what that loses."""
        fragment, key = number % len(self.fragments), Key(step=number, microbatch=cloud)
        encoder = self._encoders[fragment]
        if self.residuals:
            delta = delta + self.residuals[fragment].to(delta.device) * self.rule.feedback
        payload = encoder.encode(delta, key=key, keeps=False)
        if self.residuals:
            kept = encoder.decode(payload, key=key, num_rows=len(delta), keeps=False)
            self.residuals[fragment].copy_(delta - kept)
        return tuple(one.cpu() for one in payload)

    def rows_of(self, payload: Payload, fragment: int, rows: range) -> Payload:
        """The part of a coded delta that stands for these rows."""
        num_rows = self.fragments[fragment].num_rows
        return tuple(part.view(num_rows, -1)[rows.start : rows.stop].flatten() for part in payload)

    def decode(self, number: int, cloud: int, payload: Payload, *, num_rows: int) -> Tensor:
        """What a cloud's coded delta stands for."""
        key = Key(step=number, microbatch=cloud)
        return self._decoder.decode(payload, key=key, num_rows=num_rows, keeps=False)

    def encode_sum(self, number: int, total: Tensor) -> Payload:
        """The mean of deltas, coded once for all."""
        return self._summer.encode(total, key=Key(step=number, microbatch=0), keeps=False)

    def decode_sum(self, number: int, payload: Payload, *, num_rows: int) -> Tensor:
        """What all clouds decode of a coded mean."""
        return self._summer.decode(
            payload, key=Key(step=number, microbatch=0), num_rows=num_rows, keeps=False
        )

    # Rounds.

    def apply(self, number: int, delta: Tensor) -> None:
        """Make the outer parameters after a round of those before it."""
        fragment = number % len(self.fragments)
        with self.lock:
            if self.rule.sync == "exact":
                self._adamw(number, delta)
                return
            if self.rule.momentum:
                (momentum,) = self.moments[fragment]
                momentum.mul_(self.rule.momentum).add_(delta)
                delta.add_(momentum * self.rule.momentum)
            delta.mul_(-self.rule.learning_rate)
            self.values[fragment].add_(delta)
            if self.shifts:
                self.shifts[fragment].add_(delta)

    def _adamw(self, step: int, gradient: Tensor) -> None:
        """As torch does it, on one matrix; matrices among the parameters decay, vectors do not."""
        values, (mean, square) = self.values[0], self.moments[0]
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if self._max_norm is not None and norm > self._max_norm:
            gradient.mul_(self._max_norm / (norm + _NORM_EPSILON))
        rate = self._schedule.at(step)
        mean.mul_(_BETAS[0]).add_(gradient * (1 - _BETAS[0]))
        square.mul_(_BETAS[1]).add_(gradient.mul_(gradient).mul_(1 - _BETAS[1]))
        for one in self.fragments[0].pieces(values).values():
            if one.ndim > 1:
                one.mul_(1 - rate * self._weight_decay)
        scale = square.sqrt().div_(math.sqrt(1 - _BETAS[1] ** (step + 1))).add_(_EPSILON)
        values.sub_(mean.div(scale).mul_(rate / (1 - _BETAS[0] ** (step + 1))))

    def digest(self, fragment: int) -> str:
        """Of the outer parameters of a fragment, to the bit."""
        data = flat_bytes(self.values[fragment]).numpy().data
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    # State.

    def put_in_place(self) -> None:
        """Give the model the outer parameters."""
        with torch.no_grad(), self.lock:
            for fragment, matrix in zip(self.fragments, self.values, strict=True):
                fragment.set(matrix)
                self.share(fragment.parameters)

    def state_of(self, fragment: int) -> dict[str, Tensor]:
        """Copies of what a cloud needs that is behind."""
        with self.lock:
            every = [self.values[fragment], *self.moments[fragment]]
            return {str(number): one.clone() for number, one in enumerate(every)}

    def check_state(self, fragment: int, state: Mapping[str, Tensor]) -> None:
        """Refuse a state of other shapes."""
        own = [self.values[fragment], *self.moments[fragment]]
        if {name: one.shape for name, one in state.items()} != {
            str(number): one.shape for number, one in enumerate(own)
        }:
            raise FrameError(f"the state of fragment {fragment} is of another model")

    def replace(self, fragment: int, state: Mapping[str, Tensor]) -> None:
        """Continue from what a donor has sent."""
        own = [self.values[fragment], *self.moments[fragment]]
        with self.lock:
            before = self.values[fragment].clone() if self.shifts else None
            for number, one in enumerate(own):
                one.copy_(state[str(number)])
            if before is not None:
                self.shifts[fragment].add_(self.values[fragment] - before)

    def tensors(self) -> dict[str, Tensor]:
        """All that is saved, by the names of the parameters."""
        found: dict[str, Tensor] = {}
        for number, fragment in enumerate(self.fragments):
            matrices = {"value": self.values[number]}
            matrices |= {f"moment{index}": one for index, one in enumerate(self.moments[number])}
            if self.shifts:
                matrices |= {"shift": self.shifts[number], "residual": self.residuals[number]}
            for kind, matrix in matrices.items():
                for name, one in fragment.pieces(matrix).items():
                    found[f"outer/{kind}/{name}"] = self._sharded(name, one)
        return found
