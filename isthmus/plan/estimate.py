"""Estimates the costs of a model from its sizes alone, where nothing was measured.

The estimate counts products, what a layer keeps and what a backward pass needs on top, as a decoder with
fused attention has them. A plan that was made from an estimate says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from isthmus.errors import UserError
from isthmus.job.sections import LoraSpec
from isthmus.plan.costs import WIDE_BYTES, ModelCosts, PartCosts, Task, Workload

# Tables of every possible stage grow with the square of the layers: these take some 15 s and 1 GB to plan.
_MAX_LAYERS: Final = 512
_EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
# What a layer keeps of each token, in numbers as wide as the residual stream: norms and sums of the width.
_KEPT_STREAMS: Final = 7
# A feed-forward part that is four times as wide as the model has no gate, by custom.
_UNGATED_RATIO: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedModel:
    """The sizes of a transformer, and what of it is trained."""

    task: Task
    num_layers: int
    width: int
    inner_width: int
    vocabulary_size: int
    query_width: int
    key_width: int
    num_experts: int
    num_active_experts: int
    num_positions: int
    """Positions with a vector of their own."""
    is_tied: bool
    num_frozen: int = 0
    lora: LoraSpec | None = None

    @property
    def _num_inner_products(self) -> int:
        return 2 if self.inner_width == _UNGATED_RATIO * self.width else 3

    @property
    def _attention_weights(self) -> int:
        return 2 * self.width * (self.query_width + self.key_width)

    @property
    def _inner_weights(self) -> int:
        """Of one expert, or of the only feed-forward part."""
        return self._num_inner_products * self.width * self.inner_width

    def costs(self, workload: Workload) -> ModelCosts:
        """The costs of all parts for a micro-batch."""
        stream = workload.arithmetic.stream_bytes * self.width * workload.num_tokens
        table = self.vocabulary_size * self.width
        return ModelCosts(
            workload=workload,
            width=self.width,
            embedding=self._embedding(workload, stream),
            layers=tuple(self._layer(workload, layer, stream) for layer in range(self.num_layers)),
            head=self._head(workload, stream),
            num_tied_parameters=table if self.is_tied and self.task.is_language_model else 0,
            num_embedding_parameters=table,
            arrival_bytes=(stream,) * self.num_layers,
        )

    def _embedding(self, workload: Workload, stream: int) -> PartCosts:
        is_trained = self.lora is None and self.num_frozen == 0
        table, num_parameters = (
            rows * self.width for rows in (self.vocabulary_size, self.vocabulary_size + self.num_positions)
        )
        table_bytes = workload.arithmetic.stream_bytes * table
        return PartCosts(
            num_parameters=num_parameters,
            num_trained=num_parameters if is_trained else 0,
            flops=0.0,
            float32_flops=0.0,
            moved_bytes=2.0 * stream,
            kept_bytes=float(stream) if is_trained else 0.0,
            forward_bytes=stream,
            backward_bytes=float(table_bytes) if is_trained else 0.0,
            largest_parameter=table if is_trained else 0,
            backward_share=2.0 if is_trained else 0.0,
        )

    def _layer(self, workload: Workload, layer: int, stream: int) -> PartCosts:
        num_tokens, arithmetic = workload.num_tokens, workload.arithmetic
        is_frozen, lora = layer < self.num_frozen, self.lora
        num_active = self.num_active_experts if self.num_experts else 1
        num_weights = (
            self._attention_weights + max(1, self.num_experts) * self._inner_weights + 2 * self.width
        )
        num_used = self._attention_weights + num_active * self._inner_weights
        num_adapted = 0 if lora is None else self._adapter_parameters(lora)
        rows = arithmetic.element_bytes * num_tokens * num_active * self.inner_width
        heads = arithmetic.element_bytes * num_tokens * 2 * (self.query_width + self.key_width)
        kept = float(_KEPT_STREAMS * stream + heads + (self._num_inner_products + 1) * rows)
        if arithmetic.is_mixed:
            kept += 2 * num_used
        largest = max(self.width * self.inner_width, self.width * self.query_width)
        weight_gradient = 0 if lora else (WIDE_BYTES + arithmetic.element_bytes) * largest
        backward = 2.0 * stream + max(2 * rows, rows + weight_gradient)
        forward = 0.0
        if is_frozen:
            kept, forward, backward = 0.0, kept, 0.0
        elif workload.recompute:
            kept, backward = float(stream), backward + kept - stream
        products = 2.0 * num_tokens * num_used
        attention = 2.0 * num_tokens * self.query_width * workload.sequence_length
        flops = products + attention + 2.0 * num_tokens * num_adapted
        share = 2.0 if lora is None else (flops + attention) / flops
        return PartCosts(
            num_parameters=num_weights + num_adapted,
            num_trained=0 if is_frozen else num_adapted if lora else num_weights,
            flops=flops,
            float32_flops=0.0,
            moved_bytes=0.0,
            kept_bytes=kept,
            forward_bytes=forward,
            backward_bytes=backward,
            largest_parameter=0 if is_frozen else num_adapted if lora else largest,
            backward_share=0.0 if is_frozen else share,
        )

    def _adapter_parameters(self, lora: LoraSpec) -> int:
        """Of one layer: two thin products beside each chosen one, or beside all."""
        num_inner = 0 if self.num_experts else self._num_inner_products
        num_products = 4 + num_inner
        sides = num_products * self.width + 2 * (self.query_width + self.key_width)
        sides += num_inner * self.inner_width
        share = 1.0 if lora.targets is None else min(1.0, len(lora.targets) / num_products)
        return round(lora.r * sides * share)

    def _head(self, workload: Workload, stream: int) -> PartCosts:
        is_trained = self.lora is None or not self.task.is_language_model
        num_classes = self.vocabulary_size if self.task.is_language_model else 2
        weights, scores = self.width * num_classes, WIDE_BYTES * num_classes * workload.num_tokens
        num_parameters = weights + self.width
        element_bytes = workload.arithmetic.element_bytes
        return PartCosts(
            num_parameters=num_parameters,
            num_trained=num_parameters if is_trained else 0,
            flops=2.0 * workload.num_tokens * weights,
            float32_flops=0.0,
            moved_bytes=4.0 * scores,
            kept_bytes=float(scores + stream + (2 * weights if workload.arithmetic.is_mixed else 0)),
            backward_bytes=float(max(2 * scores, (WIDE_BYTES + element_bytes) * weights - scores)),
            largest_parameter=weights if is_trained else 0,
            backward_share=2.0 if is_trained else 1.0,
        )


def estimated_model(
    values: Mapping[str, object], *, task: Task, num_frozen: int, lora: LoraSpec | None, has_positions: bool
) -> EstimatedModel:
    """The model of a configuration in Hugging Face's spelling; its values must fit together."""
    reader = _Reader(values)
    width, num_heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    if values.get("head_dim") is None and width % num_heads:
        raise _misfit(f"a hidden_size of {width} is no multiple of {num_heads} attention heads")
    num_shared = reader.number("num_key_value_heads", otherwise=num_heads)
    if num_heads % num_shared:
        raise _misfit(f"{num_heads} attention heads are no multiple of {num_shared} key-value heads")
    head_width = reader.number("head_dim", otherwise=width // num_heads)
    if head_width % 2 and not has_positions:
        raise _misfit(f"an odd number of a head's elements, {head_width}, cannot turn in pairs")
    num_experts = next((reader.number(key) for key in _EXPERT_KEYS if values.get(key)), 0)
    num_active = reader.number("num_experts_per_tok", otherwise=1)
    if num_experts and num_active > num_experts:
        raise _misfit(f"{num_active} experts for each token are more than all {num_experts}")
    inner_key = "moe_intermediate_size" if values.get("moe_intermediate_size") else "intermediate_size"
    return EstimatedModel(
        task=task,
        num_layers=reader.num_layers(),
        width=width,
        inner_width=reader.number(inner_key, otherwise=_UNGATED_RATIO * width),
        vocabulary_size=reader.number("vocab_size"),
        query_width=num_heads * head_width,
        key_width=num_shared * head_width,
        num_experts=num_experts,
        num_active_experts=num_active,
        num_positions=reader.number("max_position_embeddings", otherwise=1) if has_positions else 0,
        is_tied=reader.flag("tie_word_embeddings"),
        num_frozen=num_frozen,
        lora=lora,
    )


class _Reader:
    """Reads values of a configuration and refuses those of the wrong type."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def number(self, key: str, *, otherwise: int | None = None) -> int:
        value = self._values.get(key)
        value = otherwise if value is None else value
        if value is None:
            raise UserError(
                f"the costs of model_type {self._values.get('model_type')!r} are not known, and its "
                f"configuration does not give {key}",
                hint="install isthmus with its extra train, which measures them",
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "a whole number of at least 1")
        return value

    def num_layers(self) -> int:
        number = self.number("num_hidden_layers")
        if number > _MAX_LAYERS:
            raise UserError(
                f"a model of {number} layers cannot be planned, {_MAX_LAYERS} are the most",
                hint="lower num_hidden_layers of the model's configuration",
            )
        return number

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if not isinstance(value, bool | None):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def _wrong(self, key: str, value: object, what: str) -> UserError:
        return UserError(f"{key} of the model's configuration is {value!r}, not {what}")


def _misfit(what: str) -> UserError:
    return UserError(f"the model's configuration does not fit together: {what}")
