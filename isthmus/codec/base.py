"""The interface of coders, and what they know of a message.

    CodecEnd of the sender   --- payload of an activation -->      CodecEnd of the receiver
       coder.encode                                                   coder.decode
       gradient_coder.decode  <-- payload of its gradient ---         gradient_coder.encode

A codec is a chain of coders, each wrapping the coder of what it makes: `RotationCoder(rest=IntegerCoder(…))`.
A format is a coder that wraps nothing. Both ends of a cut build the same chains from the same two texts.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeAlias

import torch
from torch import Tensor

from isthmus.errors import FrameError, UserError

Payload: TypeAlias = tuple[Tensor, ...]
"""Flat uint8 tensors on the device of what was encoded; they cross in this order."""

State: TypeAlias = dict[str, Tensor]

_HOST_ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Names one message of a direction; it seeds stochastic rounding, so that no random state is kept."""

    step: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedMessage:
    """What a coder may know of the message at hand."""

    key: Key
    seed: int
    """Differs from message to message."""
    ids_N: Tensor | None = None
    """Token ids of the rows, where both ends know them."""
    keeps: bool = True
    """Whether a gradient will come: not in evaluation, nor from behind frozen layers."""
    learns: bool = True
    """Whether later messages may depend on this one: not in evaluation."""

    def sub(self, index: int) -> "CodedMessage":
        """The same message with other randomness, for one of several matrices in it."""
        return replace(self, seed=(self.seed + index) % 2**63)

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator that is seeded by the message alone."""
        return torch.Generator(device).manual_seed(self.seed)


class Coder(ABC):
    """Makes the parts of a payload of a matrix, and a matrix of the parts.

    The sender may decode what it has just encoded, to see what the receiver will: decoding a message again
    changes nothing. Sizes of parts are checked before a coder sees them; whatever their content, `decode`
    gives a matrix of the shape asked for. State is what the next message depends on: here there is none.
    """

    @abstractmethod
    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The parts of a float32 matrix of shape (rows, width)."""

    @abstractmethod
    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The float32 matrix of this shape, from as many parts as this coder and those it wraps have made."""

    def state_dict(self) -> State:
        """Everything that the next message depends on."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state that was taken at an end of the same side."""
        if state:
            raise UserError(
                f"the checkpoint holds {', '.join(state)} of another codec than the link has now",
                hint="resume with the codec and the release that the checkpoint was written with",
            )


class WrappingCoder(Coder):
    """A coder that gives what it makes of a matrix to another coder."""

    state_names: ClassVar[tuple[str, ...]] = ()
    """Tensors in `_state`; a step comes once in a codec, so names differ along a chain."""

    def __init__(self, *, rest: Coder) -> None:
        self._rest = rest
        self._state: State = {}

    def state_dict(self) -> State:
        """Its own state and that of the coders behind it."""
        return {name: one.clone() for name, one in self._state.items()} | self._rest.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Take what is its own, and give the rest to the coders behind it."""
        self._state = {name: one for name, one in state.items() if name in self.state_names}
        self._rest.load_state_dict({name: one for name, one in state.items() if name not in self._state})


class Memory:
    """What an activation leaves behind for its gradient at one end of a cut, by key.

    Keeping and forgetting happen on different threads; each is one operation of a dictionary. Nothing is kept
    unless gradients ask for it: those that do not may cross raw, and so pass here unseen.
    """

    def __init__(self, *, is_asked: bool = True) -> None:
        self._is_asked = is_asked
        self._kept: dict[Key, Tensor] = {}

    def keep(self, message: CodedMessage, tensor: Tensor) -> None:
        """Keep a tensor until the gradient has passed, if one will come."""
        if self._is_asked and message.keeps:
            self._kept[message.key] = tensor

    def find(self, message: CodedMessage) -> Tensor:
        """What the activation of this key has left."""
        found = self._kept.get(message.key)
        if found is None:
            raise FrameError(f"a gradient of {message.key}, whose activation has not passed here")
        return found

    def forget(self, key: Key) -> None:
        self._kept.pop(key, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoderSite:
    """Where a coder works: width of what crosses, device, and what activations leave for gradients."""

    width: int
    device: torch.device
    memory: Memory


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat, without a copy where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def from_bytes(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements that a part holds; a copy only where the part begins at an odd address.

    On the host that is any at which torch itself would place nothing: BLAS may add in another order there.
    """
    alignment_bytes = _HOST_ALIGNMENT_BYTES if part.device.type == "cpu" else dtype.itemsize
    if part.storage_offset() % dtype.itemsize or part.data_ptr() % alignment_bytes:
        part = part.clone()
    return part.view(dtype)
