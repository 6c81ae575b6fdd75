"""A cut between two stages: what crosses it, by which codecs, from which step on."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from isthmus.codec.base import below
from isthmus.codec.ends import Codecs
from isthmus.errors import FrameError, UserError
from isthmus.job.boundary import BottleneckSpec, BoundarySpec, HiddenSpec
from isthmus.job.codec import gradient_codec, parse_codec
from isthmus.plan.ladder import Pair

RAW: Final = parse_codec("raw")
RAW_PAIR: Final = Pair(forward=RAW, backward=RAW)
_CODECS: Final = "codecs"


def texts_of(pair: Pair) -> tuple[str, str]:
    """The codec of activations and that of gradients, as one-line texts."""
    return str(pair.forward), str(pair.backward)


def read_pair(texts: object) -> Pair:
    """The codecs that a peer or a checkpoint names."""
    match texts:
        case [str(forward), str(backward)]:
            try:
                pair = Pair(forward=parse_codec(forward), backward=parse_codec(backward))
            except ValueError as error:
                raise FrameError(f"a codec that cannot be: {str(error)[:200]}") from error
            if pair.is_possible:
                return pair
    raise FrameError(f"no two codecs of a link are named by {str(texts)[:100]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One cut as all stages know it; `codecs` are those it begins with, once a bottleneck's warm-up is over.

    Every `guard_every`-th message is measured by its sender; 0 for none.
    """

    name: str = "cut"
    boundary: BoundarySpec = field(default_factory=HiddenSpec)
    codecs: Pair = RAW_PAIR
    guard_every: int = 0
    guard_cosine: float = 0.98

    @property
    def num_warmup_steps(self) -> int:
        """Steps in which hidden states cross raw, for a bottleneck to learn from."""
        return self.boundary.num_warmup_steps if isinstance(self.boundary, BottleneckSpec) else 0


class End(Protocol):
    """One end of a cut, whose state is part of the checkpoint."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that the next message depends on."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state as if nothing had been between."""
        ...


E = TypeVar("E", bound=End)


class Code(Generic[E]):
    """What codes a cut from one step on: codecs, and their state at this end."""

    def __init__(self, pair: Pair, *, since_step: int, width: int, make: Callable[[Codecs], E], seed: int):
        self.pair = pair
        # Less what the activation has settled for both directions.
        self.gradient = gradient_codec(pair.forward, pair.backward)
        self.since_step = since_step
        self.width = width
        self.end = make(Codecs(forward=pair.forward, backward=pair.backward, width=width, seed=seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeState:
    """The codecs of a cut at the start of a step, and their state at one end, on the host."""

    pair: Pair
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCuts:
    """The codes of a rank's cuts at the start of a step, by the rank at their other end."""

    up: Mapping[int, CodeState] = field(default_factory=dict)
    down: Mapping[int, CodeState] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All of it as tensors by name; the codecs themselves as text in bytes."""
        codes = {
            f"{side}.{peer}": code
            for side, found in (("up", self.up), ("down", self.down))
            for peer, code in found.items()
        }
        texts = json.dumps({place: texts_of(code.pair) for place, code in codes.items()})
        states = {
            f"{place}/{key}": one.contiguous()
            for place, code in codes.items()
            for key, one in code.tensors.items()
        }
        return {_CODECS: torch.frombuffer(bytearray(texts.encode()), dtype=torch.uint8), **states}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """What `tensors` gave."""
        found: dict[str, dict[int, CodeState]] = {"up": {}, "down": {}}
        for place, texts in json.loads(tensors[_CODECS].numpy().tobytes()).items():
            side, _, peer = place.partition(".")
            code = CodeState(pair=read_pair(texts), tensors=below(f"{place}/", tensors))
            found[side][int(peer)] = code
        return cls(**found)


class Codebook(Generic[E]):
    """The codes of a cut at one of its ends, each from its step on.

    Threads may ask while another adds a code of a later step.
    """

    def __init__(self, cut: Cut, *, hidden_width: int, make: Callable[[Codecs], E], seed: int) -> None:
        self._make = make
        self._seed = seed
        self._crossing_width = cut.boundary.crossing_width(hidden_width)
        warmup = cut.num_warmup_steps
        first = (self._code(RAW_PAIR, since_step=0, width=hidden_width),) if warmup else ()
        self._codes = (*first, self._code(cut.codecs, since_step=warmup, width=self._crossing_width))

    def at(self, step: int) -> Code[E]:
        """The code of a step."""
        return next(code for code in reversed(self._codes) if code.since_step <= step)

    def switch(self, pair: Pair, *, step: int) -> None:
        """Let other codecs hold from a step on, unless they do already, or a warm-up is not yet over."""
        last = self._codes[-1]
        if step < last.since_step or pair == last.pair:
            return
        new = self._code(pair, since_step=step, width=self._crossing_width)
        # The code before may still have to decode; what was before that is over.
        self._codes = (*self._codes[-1:], new)

    def state(self, step: int) -> CodeState:
        """What the first message of a step depends on."""
        code = self.at(step)
        tensors = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in code.end.state_dict().items()
        }
        return CodeState(pair=code.pair, tensors=tensors)

    def restore(self, state: CodeState, *, step: int) -> None:
        """Go on at a step as from the state that was taken there."""
        self.switch(state.pair, step=step)
        try:
            self.at(step).end.load_state_dict(dict(state.tensors))
        except (ValueError, KeyError) as error:
            raise UserError(
                f"the state of codec {state.pair.forward} in the checkpoint cannot be used: {error}",
                hint="start anew with --resume never",
            ) from error

    def _code(self, pair: Pair, *, since_step: int, width: int) -> Code[E]:
        return Code(pair, since_step=since_step, width=width, make=self._make, seed=self._seed)
