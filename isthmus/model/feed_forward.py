"""A bottleneck within a layer: its attention lies before the cut, its feed-forward behind it.

    ffn-svd     before  z = V a                     behind  LayerNorm(W₂ act(U S z + b))        no residual
    ffn-data    before  z = V (a − A_s[id])         behind  h = P z + A_r[id], then the layer's own
                                                            LayerNorm(W₂ act(W₁ h + b) + h)

`a` is what attention gives. In ffn-svd U S V is the truncated singular value decomposition of W₁, and all
three are trained; in ffn-data V and P keep best, of what was observed, both W₁ a and a itself. Until the
bottleneck begins, `a` crosses and the layer's own feed-forward runs.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from torch import Tensor, nn
from transformers import PreTrainedModel

from isthmus.errors import UserError
from isthmus.job.codec import BottleneckSpec, BoundarySpec, Init
from isthmus.model.bottleneck import Down, Up, unset
from isthmus.model.families import Absent, Family

MODEL_TYPES: Final = ("bert", "camembert", "electra", "roberta", "xlm-roberta")
_PARTS: Final = ("intermediate", "output")
_LEAST_SHARE: Final = 1e-6


def lies_within(spec: BoundarySpec) -> bool:
    """Whether a boundary before a layer parts attention and feed-forward of the layer before that."""
    return isinstance(spec, BottleneckSpec) and spec.init.is_within


def check_within(spec: BoundarySpec, config: Any) -> None:
    """Refuse a model without feed-forward parts of BERT's shape, and a rank that its matrix does not have."""
    if not isinstance(spec, BottleneckSpec) or not lies_within(spec):
        return
    if config.model_type not in MODEL_TYPES:
        raise UserError(
            f"{spec} parts layers of BERT's shape, which {config.model_type} does not have",
            hint=f"set init=pca, or take a model of type {', '.join(MODEL_TYPES)}",
        )
    if spec.rank > min(config.hidden_size, config.intermediate_size):
        raise UserError(
            f"{spec} has a rank over that of a matrix of {config.intermediate_size} × {config.hidden_size}",
            hint=f"use at most {min(config.hidden_size, config.intermediate_size)}",
        )


class FeedForwardDown(Down):
    """The sender's half; it knows the layer's first matrix as it was loaded."""

    inner_MD: Tensor | None

    def __init__(self, spec: BottleneckSpec, **sizes: int) -> None:
        super().__init__(spec, **sizes)
        self.register_buffer("inner_MD", None, persistent=False)

    @torch.no_grad()
    def begin(self) -> dict[str, Tensor]:
        """Set the values from what was observed, or from the matrix alone; gives the receiver's."""
        if self.spec.init is Init.FFN_DATA:
            return super().begin()
        rise_MD, values_D, axes_DD = torch.linalg.svd(self._inner(), full_matrices=False)
        rank = self.spec.rank
        self.weight.copy_(axes_DD[:rank])
        self.anchors.mean.zero_()
        self.explained_share = float(values_D[:rank].square().sum() / values_D.square().sum())
        return {
            "weight": torch.zeros_like(self.weight.T).contiguous(),
            "core": values_D[:rank].diag(),
            "rise": rise_MD[:, :rank].contiguous(),
            "anchors.mean": torch.zeros_like(self.anchors.mean),
        }

    def _maps(self, covariance_DD: Tensor) -> tuple[Tensor, Tensor]:
        """Maps to a few numbers and back that keep most of W₁ a and of a, both counted as much."""
        values_D, vectors_DD = torch.linalg.eigh(covariance_DD.double())
        scales_D = values_D.clamp(min=_LEAST_SHARE * float(values_D[-1])).sqrt()
        root_DD, unroot_DD = (vectors_DD * one @ vectors_DD.T for one in (scales_D, 1 / scales_D))
        seen_MD = self._inner().double() @ root_DD
        kept_DD = seen_MD.T @ seen_MD / seen_MD.square().sum() + root_DD @ root_DD / root_DD.square().sum()
        axes_DR = torch.linalg.eigh(kept_DD).eigenvectors[:, -self.spec.rank :]
        return (axes_DR.T @ unroot_DD).float(), (root_DD @ axes_DR).float()

    def _inner(self) -> Tensor:
        if self.inner_MD is None:
            raise ValueError("a bottleneck within a layer begins without the layer's matrix")
        return self.inner_MD.float()


class FeedForwardUp(Up):
    """The receiver's half, with the feed-forward of the layer, which keeps its names in the model."""

    core: nn.Parameter | None
    rise: nn.Parameter | None

    def __init__(self, spec: BottleneckSpec, **sizes: int) -> None:
        super().__init__(spec, **sizes)
        self.core = self.rise = None
        self._tail: tuple[Any, ...] = ()

    def take(self, layer: nn.Module) -> None:
        """Use the feed-forward that a layer's stand-in holds."""
        self._tail = tuple(layer.get_submodule(name) for name in _PARTS)
        if self.spec.init is Init.FFN_SVD:
            # U, S and V take the place of this matrix, so that both ends know it as it was loaded.
            inner: Any = layer.get_parameter("intermediate.dense.weight")
            inner.requires_grad_(False)
            self.requires_grad_(False)
            self.core, self.rise = unset(self.spec.rank, self.spec.rank), unset(len(inner), self.spec.rank)

    def whole(self, a_BTD: Tensor) -> Tensor:
        """What the layer itself gives, from what its attention gave."""
        intermediate, output = self._tail
        given: Tensor = output(intermediate(a_BTD), a_BTD)
        return given

    def forward(self, z_BTR: Tensor, ids_BT: Tensor) -> Tensor:
        """What the layer gives, from what crossed."""
        if self.core is None or self.rise is None:
            return self.whole(super().forward(z_BTR, ids_BT))
        intermediate, output = self._tail
        with torch.autocast(z_BTR.device.type, enabled=False):
            inner_BTM = F.linear(F.linear(z_BTR.float(), self.core), self.rise, intermediate.dense.bias)
        given: Tensor = output.dense(intermediate.intermediate_act_fn(inner_BTM))
        normed: Tensor = output.LayerNorm(output.dropout(given))
        return normed


def parted(model: PreTrainedModel, family: Family, index: int) -> list[nn.Module]:
    """The feed-forward of a layer; asked for before stand-ins take its place."""
    layer = model.base_model.get_submodule(family.layer_path(index))
    return [layer.get_submodule(name) for name in _PARTS]


def put_behind(model: PreTrainedModel, family: Family, index: int, parts: list[nn.Module]) -> None:
    """Give a layer's stand-in the feed-forward that lies behind the cut, by its own names."""
    layer = model.base_model.get_submodule(family.layer_path(index))
    for name, part in zip(_PARTS, parts, strict=True):
        layer.add_module(name, part)


def take_off(model: PreTrainedModel, family: Family, index: int, down: FeedForwardDown) -> None:
    """Let a layer before the cut end with its attention; `down` keeps its first matrix."""
    layer = model.base_model.get_submodule(family.layer_path(index))
    down.inner_MD = layer.get_parameter("intermediate.dense.weight").detach().clone()
    for name in _PARTS:
        layer.set_submodule(name, Absent(layer.get_submodule(name)))
