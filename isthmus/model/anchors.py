"""What both ends of a bottleneck know of hidden states beforehand: a mean for each token id, or for all.

Rows by token id are kept in units that make them as large as the rows of a model's own embeddings. A step of
the optimizer moves every number by about the learning rate, however large it is: means as they are, which may
be a hundred times as large as embeddings, would hardly learn while the model around them does.
"""

import math
from abc import ABC, abstractmethod
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from torch import Tensor, nn

from isthmus.codec.observed import Observed, TokenMeans, principal_axes
from isthmus.job.codec import BottleneckSpec
from isthmus.job.codec_steps import Anchor

# 64 MiB of float32: a table of means larger than that is factorised.
_MAX_ENTRIES: Final = 2**24
_MIN_OBSERVED_IDS: Final = 8192


class Anchors(nn.Module, ABC):
    """A mean of hidden states for every token; without values until it has learnt or been given them."""

    @abstractmethod
    def forward(self, ids_BT: Tensor) -> Tensor:
        """The mean for each token, that broadcasts to (batch, tokens, width)."""

    @abstractmethod
    def learn(self, observed: Observed) -> Tensor:
        """Take what was observed; gives the covariance of hidden states around these anchors."""

    @property
    def rows(self) -> nn.Parameter | None:
        """What it has a row of for each token id."""
        return None

    @torch.no_grad()
    def round_values(self) -> None:
        """Keep only what crosses a link at half the bytes, so that both ends begin with the same values."""
        for parameter in self.parameters():
            parameter.copy_(parameter.to(link_dtype(parameter)))


class MeanAnchors(Anchors):
    """One mean for all tokens."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.mean = unset(width)

    def forward(self, ids_BT: Tensor) -> Tensor:  # noqa: ARG002 others do
        """The mean."""
        return self.mean

    @torch.no_grad()
    def learn(self, observed: Observed) -> Tensor:
        """Take the mean."""
        self.mean.copy_(observed.mean_D)
        return observed.covariance()


class TableAnchors(Anchors):
    """A mean for every token id, as its deviation from the mean of all."""

    unit: Tensor

    def __init__(self, *, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.mean = unset(width)
        self.table = unset(vocabulary_size, width)
        self.register_buffer("unit", torch.tensor(math.nan))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The mean of each token's id."""
        return self.mean + self.unit * F.embedding(ids_BT, self.table)

    @property
    def rows(self) -> nn.Parameter:
        """The table."""
        return self.table

    @torch.no_grad()
    def learn(self, observed: Observed) -> Tensor:
        """Take the means; an id that never came keeps the mean of all."""
        self.mean.copy_(observed.mean_D)
        self.table.copy_(_tokens(observed).deviations_of(_all_ids(self.table), observed.mean_D))
        self.unit.copy_(_unit_of(self.table, width=len(self.mean)))
        self.table.div_(self.unit)
        return observed.covariance()


class FactoredAnchors(Anchors):
    """Means by token id for large vocabularies: a few numbers per id, times directions that all ids share."""

    unit: Tensor

    def __init__(self, *, vocabulary_size: int, width: int, code_width: int) -> None:
        super().__init__()
        self.mean = unset(width)
        self.codes = unset(vocabulary_size, code_width)
        self.directions = unset(code_width, width)
        self.register_buffer("unit", torch.tensor(math.nan))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The mean of each token's id."""
        return self.mean + self.unit * (F.embedding(ids_BT, self.codes) @ self.directions)

    @property
    def rows(self) -> nn.Parameter:
        """The few numbers of each id."""
        return self.codes

    @torch.no_grad()
    def learn(self, observed: Observed) -> Tensor:
        """Take the directions in which the means of ids vary most; an id that never came keeps the mean."""
        tokens = _tokens(observed)
        between_DD = tokens.covariance(observed.mean_D)
        axes_DQ = principal_axes(between_DD, rank=len(self.directions))
        self.mean.copy_(observed.mean_D)
        self.directions.copy_(axes_DQ.T)
        for ids_N in torch.split(_all_ids(self.codes), _MIN_OBSERVED_IDS):
            self.codes[ids_N] = tokens.deviations_of(ids_N, observed.mean_D) @ axes_DQ
        self.unit.copy_(_unit_of(self.codes, width=len(self.mean)))
        self.codes.div_(self.unit)
        rest_DD = torch.eye(len(axes_DQ), device=axes_DQ.device) - axes_DQ @ axes_DQ.T
        return observed.covariance() + rest_DD @ between_DD @ rest_DD


def make_anchors(spec: BottleneckSpec, *, width: int, vocabulary_size: int) -> Anchors:
    """The anchors of either end, factorised where a table would be large."""
    if spec.anchor is Anchor.NONE:
        return MeanAnchors(width=width)
    if vocabulary_size * width <= _MAX_ENTRIES:
        return TableAnchors(vocabulary_size=vocabulary_size, width=width)
    # Directions that the bottleneck sends anyway need no anchor, so there must be more of them than its rank.
    code_width = min(width // 2, max(2 * spec.rank, _MAX_ENTRIES // vocabulary_size))
    return FactoredAnchors(vocabulary_size=vocabulary_size, width=width, code_width=max(code_width, 1))


def make_observed(spec: BottleneckSpec, *, width: int, vocabulary_size: int) -> Observed:
    """What the sender must observe for these anchors; of a large vocabulary, only the ids that come first."""
    if spec.anchor is Anchor.NONE:
        return Observed(width=width, tokens=None)
    num_rows = min(vocabulary_size, max(_MIN_OBSERVED_IDS, _MAX_ENTRIES // width))
    tokens = TokenMeans(vocabulary_size=vocabulary_size, num_rows=num_rows, width=width)
    return Observed(width=width, tokens=tokens)


def link_dtype(parameter: Tensor) -> torch.dtype:
    """The type in which an anchor's values cross: half the bytes where there are many of them."""
    return torch.bfloat16 if parameter.ndim > 1 else torch.float32


def unset(*shape: int) -> nn.Parameter:
    """A parameter that has no value yet; NaN, so that a use before its time is seen."""
    return nn.Parameter(torch.full(shape, math.nan))


def _unit_of(rows_VX: Tensor, *, width: int) -> Tensor:
    """By what to divide rows so that those that are not zero have numbers of one over the root of a width."""
    num_known = (rows_VX != 0).any(-1).sum().clamp(min=1)
    mean_square = rows_VX.square().sum() / (num_known * rows_VX.shape[-1])
    return torch.where(mean_square > 0, (mean_square * width).sqrt(), 1.0)


def _tokens(observed: Observed) -> TokenMeans:
    if observed.tokens is None:
        raise ValueError("anchors by token id need means by token id")
    return observed.tokens


def _all_ids(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)
