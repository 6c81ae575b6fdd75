"""A matrix as a product of two thin ones, by subspace iteration that starts where the last message ended."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, Payload, State
from isthmus.job.codec_steps import svd_rank

_BASIS: Final = "basis"
_REST: Final = "rest."
_ROUNDS: Final = 2
_ROUNDS_FROM_NOTHING: Final = 3


class SvdCoder:
    """Left factor Q (orthonormal), then right factor XᵀQ, each with a row per direction.

    A matrix that two factors would not make smaller crosses whole. Only the sender has state: the directions
    of its last message, from which the next one starts. One element that is not finite makes all of them NaN.
    """

    def __init__(self, ratio: float, *, rest: Coder) -> None:
        self._ratio = ratio
        self._rest = rest
        self._basis_DK: Tensor | None = None

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The parts of the left factor, and those of the right one."""
        num_rows, width = x_ND.shape
        rank = svd_rank(self._ratio, num_rows, width)
        if rank is None:
            return self._rest.encode(x_ND, message)
        left_NK, right_DK = self._factors(x_ND, rank, message)
        left = self._rest.encode(left_NK.T.contiguous(), message)
        return (*left, *self._rest.encode(right_DK.T.contiguous(), message.sub(1)))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The product of the factors."""
        num_rows, width = shape
        rank = svd_rank(self._ratio, num_rows, width)
        if rank is None:
            return self._rest.decode(parts, shape, message)
        left_KN = self._rest.decode(parts, (rank, num_rows), message)
        right_KD = self._rest.decode(parts, (rank, width), message.sub(1))
        return left_KN.T @ right_KD

    def state_dict(self) -> State:
        """The directions of the last message."""
        own = {} if self._basis_DK is None else {_BASIS: self._basis_DK}
        return own | {_REST + name: tensor for name, tensor in self._rest.state_dict().items()}

    def load_state_dict(self, state: State) -> None:
        """Continue from these directions."""
        self._basis_DK = state.get(_BASIS)
        self._rest.load_state_dict(
            {name.removeprefix(_REST): one for name, one in state.items() if name.startswith(_REST)}
        )

    def _factors(self, x_ND: Tensor, rank: int, message: CodedMessage) -> tuple[Tensor, Tensor]:
        start_DK = self._start(x_ND, rank, message)
        num_rounds = _ROUNDS_FROM_NOTHING if self._basis_DK is None else _ROUNDS
        basis_DK = start_DK
        for _ in range(num_rounds - 1):
            basis_DK = _orthonormal(x_ND.T @ (x_ND @ basis_DK))
        left_NK = _orthonormal(x_ND @ basis_DK)
        right_DK = x_ND.T @ left_NK
        if message.learns:
            # What is not finite must not reach the messages after it.
            self._basis_DK = torch.where(right_DK.isfinite().all(), _orthonormal(right_DK), start_DK)
        return left_NK, right_DK

    def _start(self, x_ND: Tensor, rank: int, message: CodedMessage) -> Tensor:
        """The first directions of the last message, and random ones where it had fewer."""
        generator = message.generator(x_ND.device)
        random_DK = torch.randn(x_ND.shape[1], rank, generator=generator, device=x_ND.device)
        if self._basis_DK is not None:
            known = min(rank, self._basis_DK.shape[1])
            random_DK[:, :known] = self._basis_DK[:, :known].to(x_ND.device)
        return random_DK


def _orthonormal(y_NK: Tensor) -> Tensor:
    factor: Tensor = torch.linalg.qr(y_NK).Q
    return factor
