"""How the ranks of a cloud come to one gradient: summed once a step, after the last backward.

Each rank runs micro-batches of its own, in its own order, so nothing may be exchanged while they run: a rank
would wait for a sibling that waits for what only the next pass of this rank sets free. A loss is weighted by
the targets of the whole step, so the sum is what one process would have.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from isthmus.train.ranks.world import World

_BUCKET_BYTES: Final = 64 * 1024 * 1024


class Reduction(Protocol):
    """What happens to the parameters of a stage at the edges of a turn; all ranks do it together."""

    def begin(self, *, is_training: bool) -> None:
        """Make the parameters ready for passes."""

    def reduce(self) -> None:
        """Sum the gradients over all ranks."""

    def squared_norms(self, own: tuple[float, ...]) -> tuple[float, ...]:
        """The squared norm of each parameter's gradient, from what this rank holds of it."""


class NoReduction:
    """One rank, or a stage that learns nothing."""

    def begin(self, *, is_training: bool) -> None:
        """Nothing to do."""

    def reduce(self) -> None:
        """Nothing to do."""

    def squared_norms(self, own: tuple[float, ...]) -> tuple[float, ...]:
        """What it is given."""
        return own


class PlainReduction:
    """Every rank has all parameters; gradients are summed in one fixed order, many in one message."""

    def __init__(self, world: World, parameters: Mapping[str, nn.Parameter]) -> None:
        self._world = world
        trained = [name for name in sorted(parameters) if parameters[name].requires_grad]
        self._parameters = [parameters[name] for name in trained]

    def begin(self, *, is_training: bool) -> None:
        """Nothing to do: the parameters are here."""

    def reduce(self) -> None:
        """Sum the gradients over all ranks; one without a micro-batch adds nothing."""
        if not self._parameters:
            return
        used = self._world.totals([one.grad is not None for one in self._parameters])
        present = [one for one, count in zip(self._parameters, used, strict=True) if count]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in buckets([_gradient(one) for one in present], max_bytes=_BUCKET_BYTES):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            self._world.add_up(flat)
            pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def squared_norms(self, own: tuple[float, ...]) -> tuple[float, ...]:
        """What it is given: every rank has the whole gradient."""
        return own


def buckets(tensors: Sequence[Tensor], *, max_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors in order, as many together as fit and are of one type; a large one may be alone."""
    taken: list[Tensor] = []
    for tensor in tensors:
        num_bytes = sum(one.nbytes for one in taken) + tensor.nbytes
        if taken and (num_bytes > max_bytes or tensor.dtype != taken[0].dtype):
            yield taken
            taken = []
        taken.append(tensor)
    if taken:
        yield taken


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ValueError("a parameter without a gradient is summed")
    return parameter.grad
