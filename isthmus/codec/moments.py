"""What a sender learns from rows that pass: their moments, principal directions, and a mean per token."""

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

NUM_SLOTS: Final = 4096
"""Token ids that have an anchor of their own; larger ones share the same slots."""

_MAX_SQUARED_NORM: Final = 1e30
_NUM_SPARE: Final = 8
_NUM_ITERATIONS: Final = 4
_PRIOR_ROWS: Final = 16.0
_PRIOR_ROWS_OF_TOKEN: Final = 4.0
_SPREAD: Final = 2654435761


@dataclass(slots=True, kw_only=True)
class Moments:
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


def principal(moments: Moments, *, rank: int, start_DR: Tensor | None) -> tuple[Tensor, Tensor]:
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
