"""A model of transformers with bottlenecks between its layers, as it was trained across clouds.

    h ← W_up W_down h + b + t[id]        before the layers that `boundaries` of the configuration names

A bottleneck before the layer that would follow an encoder's last one lies between encoder and decoder.

This file lies beside the weights, so it needs nothing but torch and transformers:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

`model.inner` is the model as transformers knows it. Without the bottlenecks it predicts worse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel


class BottleneckConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of the inner model, its auto class, where its layers lie, and the bottlenecks."""

    model_type = "isthmus_bottleneck"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012 as transformers declares it

    def __init__(
        self,
        *,
        text_config: Mapping[str, Any] | PreTrainedConfig | None = None,
        auto_class: str = "AutoModelForCausalLM",
        layers: str = "layers",
        boundaries: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        if isinstance(text_config, Mapping):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config
        self.auto_class = auto_class
        self.layers = layers
        self.boundaries = [dict(one) for one in boundaries]
        super().__init__(**others)


class Boundary(nn.Module):
    """A bottleneck, of the sizes that its entry in `boundaries` gives; all arithmetic is float32.

    A token adds nothing, a row of its own, or `code_width` numbers times directions that all tokens share.
    """

    def __init__(
        self,
        *,
        width: int,
        rank: int,
        vocabulary_size: int | None = None,
        code_width: int | None = None,
        **_others: Any,
    ) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)
        self.tokens = None if vocabulary_size is None else nn.Embedding(vocabulary_size, code_width or width)
        self.directions = None if code_width is None else nn.Linear(code_width, width, bias=False)

    def forward(self, hidden_BTD: Tensor, ids_BT: Tensor | None) -> Tensor:
        """The hidden states that the next layer gets."""
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            narrow_BTR = F.linear(hidden_BTD.float(), self.down.weight.float())
            wide_BTD = F.linear(narrow_BTR, self.up.weight.float(), self.up.bias.float())
            return (wide_BTD + self._of_tokens(ids_BT)).to(hidden_BTD.dtype)

    def _of_tokens(self, ids_BT: Tensor | None) -> Tensor | float:
        if self.tokens is None:
            return 0.0
        if ids_BT is None:
            raise ValueError("a model with bottlenecks by token needs input_ids, and not inputs_embeds")
        rows_BTX = F.embedding(ids_BT, self.tokens.weight).float()
        return rows_BTX if self.directions is None else F.linear(rows_BTX, self.directions.weight.float())


class LowRank(nn.Module):
    """Three maps in the place of a layer's first feed-forward matrix; the layer has no residual then."""

    def __init__(self, *, width: int, rank: int, inner_width: int, **_others: Any) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.core = nn.Linear(rank, rank, bias=False)
        self.rise = nn.Linear(rank, inner_width, bias=False)

    def take_place(self, layer: nn.Module) -> None:
        """Let a layer use these maps."""

        def product(dense: Any, args: tuple[Any, ...], _output: Tensor) -> Tensor:
            with torch.autocast(args[0].device.type, enabled=False):
                narrow = F.linear(args[0].float(), self.down.weight.float())
                core = F.linear(narrow, self.core.weight.float())
                return F.linear(core, self.rise.weight.float(), dense.bias.float()).to(args[0].dtype)

        def without_residual(_output: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return args[0], torch.zeros_like(args[1]), *args[2:]

        layer.get_submodule("intermediate.dense").register_forward_hook(product)
        layer.get_submodule("output").register_forward_pre_hook(without_residual)


class BottleneckModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The inner model, with a bottleneck before each layer that the configuration names."""

    config_class = BottleneckConfig
    _keep_in_fp32_modules_strict = ["boundaries"]  # noqa: RUF012 as transformers declares it
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: BottleneckConfig) -> None:
        super().__init__(config)
        self.inner: PreTrainedModel = getattr(transformers, config.auto_class).from_config(config.text_config)
        self.boundaries = nn.ModuleDict(
            {
                str(one["layer"]): (LowRank if "inner_width" in one else Boundary)(**one)
                for one in config.boundaries
            }
        )
        within = {str(one["layer"]) for one in config.boundaries if one.get("within")}
        self._ids: Tensor | None = None
        base = self.inner.base_model
        layers = base.get_submodule(config.layers)
        # Generation calls the encoder of an encoder–decoder by itself.
        whole = base.get_submodule("encoder") if self.inner.config.is_encoder_decoder else self.inner
        whole.register_forward_pre_hook(self._note_ids, with_kwargs=True)
        for index, boundary in self.boundaries.items():
            if index in within:
                layer = layers.get_submodule(str(int(index) - 1))
                if isinstance(boundary, LowRank):
                    boundary.take_place(layer)
                else:
                    layer.get_submodule("attention").register_forward_hook(self._attended(boundary))
                continue
            if int(index) == sum(1 for _ in layers.children()):
                whole.register_forward_hook(self._leaving(boundary))
                continue
            layer = layers.get_submodule(index)
            layer.register_forward_pre_hook(self._crossing(boundary), with_kwargs=True)
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the inner model gives."""
        return self.inner(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the inner model generates."""
        self.inner.generation_config = self.generation_config
        return self.inner.generate(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """Those of the inner model."""
        embeddings: nn.Module = self.inner.get_input_embeddings()
        return embeddings

    def _note_ids(self, _inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._ids = args[0] if args else kwargs.get("input_ids")

    def _crossing(self, boundary: nn.Module) -> Any:
        def cross(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (boundary(args[0], self._ids), *args[1:]), kwargs
            name = next(iter(kwargs))
            return args, {**kwargs, name: boundary(kwargs[name], self._ids)}

        return cross

    def _attended(self, boundary: nn.Module) -> Any:
        def attend(_attention: nn.Module, _args: Any, output: Any) -> Any:
            return (boundary(output[0], self._ids), *output[1:])

        return attend

    def _leaving(self, boundary: nn.Module) -> Any:
        def leave(_encoder: nn.Module, _args: Any, output: Any) -> Any:
            output.last_hidden_state = boundary(output.last_hidden_state, self._ids)
            return output

        return leave
