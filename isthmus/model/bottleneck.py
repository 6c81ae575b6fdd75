"""The boundary kind `bottleneck`: a trained projection at the sending stage, and its way back at the next.

    sender      z = W_down (h − A_s[id])        A_s frozen
    receiver    ĥ = W_up z + A_r[id]            A_r trained

Hidden states cross as they are during a warm-up, in which the sender observes them. `Down.begin` then makes
both ends' values of what it saw, and `Up.begin` takes the receiver's. All arithmetic is float32.

Both ends have anchors A, a mean of hidden states for each token id or one for all. Rows by token id are kept
in units that make them as large as the rows of a model's own embeddings. A step of the optimizer moves every
number by about the learning rate, however large it is: means as they are, which may be a hundred times as
large as embeddings, would hardly learn while the model around them does.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from torch import Tensor, nn

from isthmus.codec.low_rank import Observed, TokenMeans, principal_axes
from isthmus.errors import FrameError
from isthmus.job.codec import BottleneckSpec, Init
from isthmus.job.codec_steps import Anchor

# 64 MiB of float32: a table of means larger than that is factorised.
_MAX_ENTRIES: Final = 2**24
_MIN_OBSERVED_IDS: Final = 8192


class Anchors(nn.Module):
    """A mean of hidden states for every token; without values until it has learnt or been given them.

    How far the mean of a token id lies from the mean of all is a row of `table`. Large vocabularies have
    `codes` instead: a few numbers per id, times `directions` that all ids share.
    """

    mean: nn.Parameter
    table: nn.Parameter | None
    codes: nn.Parameter | None
    directions: nn.Parameter | None
    unit: Tensor | None

    def __init__(self, *, width: int, num_ids: int = 0, code_width: int = 0) -> None:
        super().__init__()
        self.mean = unset(width)
        self.table = unset(num_ids, width) if num_ids and not code_width else None
        self.codes = unset(num_ids, code_width) if code_width else None
        self.directions = unset(code_width, width) if code_width else None
        self.register_buffer("unit", torch.tensor(math.nan) if num_ids else None)

    @property
    def rows(self) -> nn.Parameter | None:
        """What it has a row of for each token id."""
        return self.table if self.codes is None else self.codes

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The mean for each token, that broadcasts to (batch, tokens, width)."""
        if self.rows is None or self.unit is None:
            return self.mean
        rows_BTX = F.embedding(ids_BT, self.rows)
        return self.mean + self.unit * (rows_BTX if self.directions is None else rows_BTX @ self.directions)

    @torch.no_grad()
    def learn(self, observed: Observed) -> Tensor:
        """Take what was observed; gives the covariance of hidden states around these anchors.

        An id that never came keeps the mean of all.
        """
        mean_D, covariance_DD = observed.mean_D, observed.covariance()
        self.mean.copy_(mean_D)
        if self.rows is None or self.unit is None or observed.tokens is None:
            return covariance_DD
        axes_DQ = None
        if self.directions is not None:
            between_DD = observed.tokens.covariance(mean_D)
            axes_DQ = principal_axes(between_DD, rank=len(self.directions))
            self.directions.copy_(axes_DQ.T)
            rest_DD = torch.eye(len(axes_DQ), device=axes_DQ.device) - axes_DQ @ axes_DQ.T
            covariance_DD = covariance_DD + rest_DD @ between_DD @ rest_DD
        all_ids = torch.arange(len(self.rows), device=self.rows.device)
        for ids_N in torch.split(all_ids, _MIN_OBSERVED_IDS):
            off_ND = observed.tokens.deviations_of(ids_N, mean_D)
            self.rows[ids_N] = off_ND if axes_DQ is None else off_ND @ axes_DQ
        self.unit.copy_(_unit_of(self.rows, width=len(mean_D)))
        self.rows.div_(self.unit)
        return covariance_DD

    @torch.no_grad()
    def round_values(self) -> None:
        """Keep only what crosses a link at half the bytes, so that both ends begin with the same values."""
        for parameter in self.parameters():
            parameter.copy_(parameter.to(link_dtype(parameter)))


def make_anchors(spec: BottleneckSpec, *, width: int, vocabulary_size: int) -> Anchors:
    """The anchors of either end, factorised where a table would be large."""
    if spec.anchor is Anchor.NONE:
        return Anchors(width=width)
    if vocabulary_size * width <= _MAX_ENTRIES:
        return Anchors(width=width, num_ids=vocabulary_size)
    # Directions that the bottleneck sends anyway need no anchor, so there must be more of them than its rank.
    code_width = min(width // 2, max(2 * spec.rank, _MAX_ENTRIES // vocabulary_size))
    return Anchors(width=width, num_ids=vocabulary_size, code_width=max(code_width, 1))


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


class Half(nn.Module, ABC):
    """One end's half of a bottleneck; it has no values until it begins."""

    weight: nn.Parameter
    anchors: Anchors

    def __init__(self, spec: BottleneckSpec) -> None:
        super().__init__()
        self.spec = spec

    def values(self) -> dict[str, Tensor]:
        """All that it has from its beginning on, by name."""
        buffers = {f"anchors.{name}": one for name, one in self.anchors.named_buffers()}
        return {name: one.detach() for name, one in self.named_parameters()} | buffers

    @property
    def has_begun(self) -> bool:
        """Whether it has its values, as after a resumption behind the warm-up; reads the device."""
        return not bool(self.weight.isnan().any())

    @abstractmethod
    def forward(self, x_BTX: Tensor, ids_BT: Tensor) -> Tensor:
        """What goes on from this end of the cut, given what came to it."""


class Down(Half):
    """The sender's half: hidden states to a few numbers per token."""

    def __init__(self, spec: BottleneckSpec, *, width: int, vocabulary_size: int, seed: int) -> None:
        super().__init__(spec)
        self.explained_share: float | None = None
        """The share of the hidden states' variance that the receiver can restore, as of `begin`."""
        self._seed = seed
        self.weight = unset(spec.rank, width)
        self.anchors = make_anchors(spec, width=width, vocabulary_size=vocabulary_size).requires_grad_(False)
        self.observed = make_observed(spec, width=width, vocabulary_size=vocabulary_size)

    def forward(self, h_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """What crosses, of shape (batch, tokens, rank)."""
        with torch.autocast(h_BTD.device.type, enabled=False):
            return F.linear(h_BTD.float() - self.anchors(ids_BT), self.weight)

    def observe(self, h_BTD: Tensor, ids_BT: Tensor, mask_BT: Tensor | None) -> None:
        """Learn from hidden states that cross as they are during the warm-up."""
        self.observed.add(h_BTD, ids_BT, mask_BT)

    @torch.no_grad()
    def begin(self) -> dict[str, Tensor]:
        """Set the values from what was observed; gives the receiver's by name, in float32 or bfloat16."""
        needs_sight = self.spec.init is not Init.RANDOM or self.spec.anchor is Anchor.TOKENS
        if needs_sight and self.observed.is_empty:
            raise ValueError("a bottleneck begins with what was observed, and nothing was")
        covariance_DD = self.anchors.learn(self.observed)
        self.anchors.round_values()
        down_RD, up_DR = self._maps(covariance_DD)
        self.weight.copy_(down_RD)
        self.explained_share = _explained(covariance_DD, down_RD, up_DR, self.observed.variance())
        anchors = {name: one.to(link_dtype(one)) for name, one in self.anchors.state_dict().items()}
        return {"weight": up_DR.contiguous(), **{f"anchors.{name}": one for name, one in anchors.items()}}

    def _maps(self, covariance_DD: Tensor) -> tuple[Tensor, Tensor]:
        """The sender's weight and the receiver's."""
        axes_DR = self._axes(covariance_DD)
        return axes_DR.T, axes_DR

    def _axes(self, covariance_DD: Tensor) -> Tensor:
        if self.spec.init is Init.PCA:
            return principal_axes(covariance_DD, rank=self.spec.rank)
        generator = torch.Generator().manual_seed(self._seed)
        random_DR = torch.randn(len(covariance_DD), self.spec.rank, generator=generator)
        axes_DR: Tensor = torch.linalg.qr(random_DR).Q
        return axes_DR.to(covariance_DD)


class Up(Half):
    """The receiver's half: back to hidden states."""

    def __init__(self, spec: BottleneckSpec, *, width: int, vocabulary_size: int) -> None:
        super().__init__(spec)
        self.weight = unset(width, spec.rank)
        self.anchors = make_anchors(spec, width=width, vocabulary_size=vocabulary_size)

    def forward(self, z_BTR: Tensor, ids_BT: Tensor) -> Tensor:
        """Hidden states in float32, of shape (batch, tokens, width)."""
        with torch.autocast(z_BTR.device.type, enabled=False):
            h_BTD: Tensor = F.linear(z_BTR.float(), self.weight) + self.anchors(ids_BT)
            return h_BTD

    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values that the sender's `begin` gave."""
        own = self.values()
        if tensors.keys() != own.keys():
            raise FrameError(f"a bottleneck that begins with {sorted(tensors)} instead of {sorted(own)}")
        for name, values in own.items():
            given = tensors[name]
            if given.shape != values.shape or not given.isfinite().all():
                raise FrameError(f"a bottleneck's {name} that is not finite or not {tuple(values.shape)}")
        for name, values in own.items():
            values.copy_(tensors[name])


def _explained(covariance_DD: Tensor, down_RD: Tensor, up_DR: Tensor, variance: Tensor) -> float:
    rest_DD = torch.eye(len(up_DR), device=up_DR.device) - up_DR @ down_RD
    lost = ((rest_DD @ covariance_DD) * rest_DD).sum()
    return float(1 - lost / variance.clamp(min=torch.finfo(variance.dtype).tiny))
