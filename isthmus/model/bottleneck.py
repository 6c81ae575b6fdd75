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

from isthmus.codec.observed import Observed, TokenMeans, principal_axes
from isthmus.errors import FrameError
from isthmus.job.codec import BottleneckSpec, Init
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
        needs_sight = self.spec.init is Init.PCA or self.spec.anchor is Anchor.TOKENS
        if needs_sight and self.observed.is_empty:
            raise ValueError("a bottleneck begins with what was observed, and nothing was")
        covariance_DD = self.anchors.learn(self.observed)
        self.anchors.round_values()
        axes_DR = self._axes(covariance_DD)
        self.weight.copy_(axes_DR.T)
        self.explained_share = _explained(covariance_DD, axes_DR, self.observed.variance())
        anchors = {name: one.to(link_dtype(one)) for name, one in self.anchors.state_dict().items()}
        return {"weight": axes_DR.contiguous(), **{f"anchors.{name}": one for name, one in anchors.items()}}

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


def _explained(covariance_DD: Tensor, axes_DR: Tensor, variance: Tensor) -> float:
    lost = covariance_DD.trace() - ((covariance_DD @ axes_DR) * axes_DR).sum()
    return float(1 - lost / variance.clamp(min=torch.finfo(variance.dtype).tiny))
