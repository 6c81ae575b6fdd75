"""The boundary kind `bottleneck`: a trained projection at the sending stage, and its way back at the next.

    sender      z = W_down (h − A_s[id])        A_s frozen
    receiver    ĥ = W_up z + A_r[id]            A_r trained

Hidden states cross as they are during a warm-up, in which the sender observes them. `Down.begin` then makes
both ends' values of what it saw, and `Up.begin` takes the receiver's. All arithmetic is float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from torch import Tensor, nn

from isthmus.codec.observed import principal_axes
from isthmus.errors import FrameError
from isthmus.job.codec import BottleneckSpec, Init
from isthmus.job.codec_steps import Anchor
from isthmus.model.anchors import Anchors, link_dtype, make_anchors, make_observed, unset


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
