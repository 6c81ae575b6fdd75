"""From a job to its model with costs: measured, from the catalogue that ships with the package, or estimated.

The catalogue has tables of published models (`benchmarks/measure_catalogue.py` makes them), so that these can
be planned without torch. Of any other model the costs are estimated from its sizes, and the plan says so. The
estimate counts products, what a layer keeps and what a backward pass needs on top, as a decoder with fused
attention has them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.codec import BottleneckSpec
from isthmus.job.hub import CONFIG_FILE, find_file, no_model
from isthmus.job.sections import LoraSpec
from isthmus.plan.costs import (
    WIDE_BYTES,
    CostSource,
    CostTable,
    Messages,
    ModelCosts,
    PartCosts,
    PlannedModel,
    Task,
    Workload,
    integer_bytes,
    nothing_measured,
    parsed_table,
)
from isthmus.plan.job_facts import check_frozen, check_memory
from isthmus.units import closest

_INSTALL: Final = "install isthmus with its extra train"
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
        """The weights of one expert, or of the only feed-forward part."""
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
            kept_bytes=kept,
            forward_bytes=forward,
            backward_bytes=backward,
            largest_parameter=0 if is_frozen else num_adapted if lora else largest,
            backward_share=0.0 if is_frozen else share,
        )

    def _adapter_parameters(self, lora: LoraSpec) -> int:
        """The adapters of one layer: two thin products beside each chosen one, or beside all."""
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
                hint=f"{_INSTALL}, which measures them",
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


ENCODER_DECODER: Final = "encoder-decoder"
NEUTRAL_KEYS: Final = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""The keys of a configuration that costs do not depend on."""
_MAX_CONFIG_BYTES: Final = 16 * 2**20
_ADAPTER_WIDTH: Final = 512
_INNER_KEYS: Final = ("n_inner", "ffn_dim", "d_ff")


def read_model(
    job: Job, config: Mapping[str, object] | None = None, *, source: CostSource = nothing_measured
) -> PlannedModel:
    """The job's model with its costs, or that of another configuration in its place."""
    values = model_config(job) if config is None else config
    if values.get("model_type") == ENCODER_DECODER:
        return _encoder_decoder(job, values, source)
    num_frozen = 0 if job.model is None else job.model.frozen_layers
    found = source(job, config) or _published(job, values) or _estimated(job, values)
    check_frozen(num_frozen, num_layers=found.num_layers, num_encoder_layers=found.num_encoder_layers)
    for link in job.link:
        check_memory(link, found.num_encoder_layers)
    if found.num_encoder_layers and any(isinstance(one.boundary, BottleneckSpec) for one in job.link):
        # Within a decoder no exported model could hold one.
        cuts = (found.cuts or frozenset()) & frozenset(range(found.num_encoder_layers + 1))
        found = replace(found, cuts=cuts)
    return found


def why_not_planned(job: Job, source: CostSource, *, are_measured: bool = False) -> str | None:
    """The first thing that the planner lacks, None where it knows enough; devices may be measured first."""
    for cloud in job.cloud:
        is_known = are_measured or cloud.device == "cpu" or cloud.profile or cloud.accelerator
        if not is_known and (cloud.flops is None or cloud.memory_bytes is None):
            return f"cloud {cloud.name} does not say what its devices are; set its accelerator"
    for link in job.link:
        if link.bandwidth_bps is None or link.rtt_s is None:
            return f"the figures of link {link.name} are not known; isthmus probe JOB --write measures them"
    config = model_config(job)
    is_estimated = _task(job) is not Task.TRANSLATION and _resolved(config).get("hidden_size") is not None
    if not is_estimated and source(job) is None:
        return f"the costs of model_type {config.get('model_type')!r} are not known"
    return None


def may_plan(job: Job, source: CostSource = nothing_measured) -> bool:
    """Whether a plan can be made once all clouds are measured."""
    return why_not_planned(job, source, are_measured=True) is None


def with_task(job: Job, task: Task) -> Job:
    """The job of another task, all of whose model is trained."""
    model = None if job.model is None else job.model.model_copy(update={"frozen_layers": 0, "lora": None})
    data = None if job.data is None else job.data.model_copy(update={"task": task.value})
    return job.model_copy(update={"model": model, "data": data})


def model_config(job: Job) -> Mapping[str, object]:
    """The configuration of the job's model."""
    model = job.given_model
    if model.source is None:
        return model.config or {}
    config = load_config(model.source)
    if config.get("quantization_config") is not None:
        raise UserError(
            f"{model.source} holds quantised weights, which cannot be trained",
            hint="start from the model in bfloat16 or float32",
        )
    return config


def load_config(source: str) -> dict[str, object]:
    """The configuration of a model in a folder or on the hub, which keeps what it has fetched before."""
    path = find_file(source, CONFIG_FILE)
    if path is None:
        raise no_model(source)
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UserError(f"{path} is too large for a model's configuration")
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise no_model(source) from error
    if not isinstance(values, dict):
        raise no_model(source)
    return values


def planned(table: CostTable, costs_of: Callable[[Workload], ModelCosts]) -> PlannedModel:
    """A model of which a table says all but how its costs are found."""
    sizes, start = table.sizes, table.sizes.num_encoder_layers
    cuts = frozenset({start} if sizes.is_joined else range(1, len(sizes.kinds)))
    return PlannedModel(
        costs_of=costs_of,
        num_layers=len(sizes.kinds),
        width=sizes.width,
        vocabulary_size=sizes.vocabulary_size,
        messages=table.messages,
        cuts=cuts if start else None,
        num_encoder_layers=start,
        is_joined=sizes.is_joined,
        max_length=sizes.max_length,
    )


@cache
def _families() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads((files("isthmus.plan") / "catalogue" / "families.json").read_text())
    return found


@cache
def _catalogue() -> tuple[tuple[str, Mapping[str, object], CostTable], ...]:
    """Task, configuration and table of every published model."""
    entries = []
    for file in (files("isthmus.plan") / "catalogue").iterdir():
        if file.name.endswith(".json") and file.name != "families.json":
            values = json.loads(file.read_text())
            entries.append((values["task"], _resolved(values["config"]), parsed_table(values)))
    return tuple(entries)


def _resolved(config: Mapping[str, object]) -> dict[str, object]:
    """All values that costs depend on, in one spelling, with the family's defaults for what is left out."""
    family = _families().get(str(config.get("model_type")), {"spellings": {}, "defaults": {}})
    spelled = {family["spellings"].get(key, key): value for key, value in config.items()}
    for key in _INNER_KEYS:
        if spelled.get(key) is not None:
            spelled.setdefault("intermediate_size", spelled[key])
    found = {**family["defaults"], **spelled}
    if found.get("num_key_value_heads") is None:
        found["num_key_value_heads"] = found.get("num_attention_heads")
    kinds = found.get("layer_types")
    if isinstance(kinds, list) and set(kinds) == {"full_attention"}:
        found["layer_types"] = None
    return {key: value for key, value in found.items() if key not in NEUTRAL_KEYS}


def _has_positions(config: Mapping[str, object]) -> bool:
    """Whether positions have vectors of their own: what has no rotary settings learns them."""
    family = _families().get(str(config.get("model_type")))
    return family is not None and not family["is_rotary"]


def _published(job: Job, config: Mapping[str, object]) -> PlannedModel | None:
    """A model of the catalogue, all of which is trained; layers of one kind may be more or fewer."""
    if job.model is None or job.model.frozen_layers or job.model.lora is not None:
        return None
    wanted = _resolved(config)
    free = {"num_hidden_layers"} | (set() if _has_positions(config) else {"max_position_embeddings"})
    for task, known, table in _catalogue():
        keys = {*wanted, *known} - free
        if task != _task(job).value or any(wanted.get(key) != known.get(key) for key in keys):
            continue
        has_kinds = len(set(table.sizes.kinds)) > 1
        if has_kinds and wanted.get("num_hidden_layers") != known.get("num_hidden_layers"):
            continue
        # Estimates stand in for what the table lacks, and refuse sizes that cannot be.
        other, kinds = _estimated(job, config), table.sizes.kinds
        if not has_kinds:
            kinds = kinds[:1] * other.num_layers
        same = replace(table, sizes=replace(table.sizes, kinds=kinds))
        return replace(other, costs_of=_else_estimated(same, other), messages=table.messages, note=None)
    return None


def _else_estimated(table: CostTable, other: PlannedModel) -> Callable[[Workload], ModelCosts]:
    """The costs of a table, or estimates for what it does not have, as a large model on a CPU."""

    def costs_of(workload: Workload) -> ModelCosts:
        try:
            return table.costs(workload)
        except KeyError:
            return other.costs_of(workload)

    return costs_of


def _task(job: Job) -> Task:
    return Task.CAUSAL_LM if job.data is None else Task(job.data.task)


def _estimated(job: Job, config: Mapping[str, object]) -> PlannedModel:
    model_type, task, values = config.get("model_type"), _task(job), _resolved(config)
    if task is Task.TRANSLATION:
        raise UserError(
            f"the costs of an encoder–decoder ({model_type}) are measured, not estimated", hint=_INSTALL
        )
    family = _families().get(str(model_type))
    if model_type is None:
        raise UserError("the model's configuration has no model_type", hint='set it, such as "llama"')
    if family is None and values.get("hidden_size") is None:
        meant = closest(str(model_type), _families())
        raise UserError(
            f"the costs of model_type {model_type!r} are not known",
            hint=f"{_INSTALL}, which measures them" + (f"; or did you mean {meant!r}?" if meant else ""),
        )
    if family is not None and task.value not in family["tasks"]:
        hint = 'set data.task to "causal-lm", or take an encoder such as BERT'
        raise UserError(f"{model_type} has no head for {task.value} in transformers", hint=hint)
    model = estimated_model(
        values,
        task=task,
        num_frozen=0 if job.model is None else job.model.frozen_layers,
        lora=None if job.model is None else job.model.lora,
        has_positions=_has_positions(config),
    )
    length = values.get("max_position_embeddings")
    starts_late = family is not None and family["starts_late"]
    return PlannedModel(
        costs_of=model.costs,
        num_layers=model.num_layers,
        width=model.width,
        vocabulary_size=model.vocabulary_size,
        messages=Messages(integer_bytes=integer_bytes(model.vocabulary_size, task)),
        max_length=length - starts_late if isinstance(length, int) else None,
        note=f"the costs of {model_type} are estimated from its sizes; with torch they are measured",
    )


def _encoder_decoder(job: Job, config: Mapping[str, object], source: CostSource) -> PlannedModel:
    """Two pretrained encoders as encoder and decoder, frozen, with trained adapters between their layers.

    The seed's fine-tuning set-up (ABNet). Every layer of the decoder attends to the encoder's final states,
    so the one possible cut lies between the two. Each layer of the encoder has an adapter of two products
    behind it, each of the decoder cross-attention and a small feed-forward part.
    """
    halves = []
    for key in ("encoder", "decoder"):
        half = config.get(key)
        if not isinstance(half, Mapping):
            raise UserError(
                f"the configuration of an encoder-decoder has no table {key!r}",
                hint=f"add [model.config.{key}] with its model_type and sizes",
            )
        halves.append(read_model(with_task(job, Task.MASKED_LM), half, source=source))
    inner = config.get("adapter_width", _ADAPTER_WIDTH)
    if not isinstance(inner, int) or inner < 1:
        raise UserError(f"adapter_width is {inner!r}, not a whole number of at least 1")
    encoder, decoder = halves
    adapter, cross = 2 * encoder.width * inner, 4 * decoder.width**2 + 2 * decoder.width * inner

    def costs_of(workload: Workload) -> ModelCosts:
        first, second = encoder.costs_of(workload), decoder.costs_of(workload)
        layer, table = second.layers[0], second.embedding
        # The decoder's embedding lies with its first layer.
        joined = replace(
            layer,
            num_parameters=table.num_parameters + layer.num_parameters,
            flops=table.flops + layer.flops,
            moved_bytes=table.moved_bytes + layer.moved_bytes,
            kept_bytes=table.kept_bytes + layer.kept_bytes,
        )
        return replace(
            first,
            # Nothing below it is trained, so nothing goes back to it.
            embedding=_frozen(first.embedding, backward_share=0.0, kept_bytes=0.0),
            layers=(
                *(_adapted(one, adapter, workload) for one in first.layers),
                *(_adapted(one, cross, workload) for one in (joined, *second.layers[1:])),
            ),
            head=replace(second.head, backward_share=1.0),
            num_tied_parameters=0,
            arrival_bytes=(*first.arrival_bytes, *second.arrival_bytes),
        )

    return replace(
        encoder,
        costs_of=costs_of,
        num_layers=encoder.num_layers + decoder.num_layers,
        cuts=frozenset({encoder.num_layers}),
        note=encoder.note or decoder.note,
    )


def _frozen(part: PartCosts, **changes: float) -> PartCosts:
    """No gradient of frozen weights is made: one of the two products of a backward pass remains."""
    changed: dict[str, Any] = {"backward_share": 1.0, **changes}
    return replace(part, num_trained=0, largest_parameter=0, **changed)


def _adapted(layer: PartCosts, num_trained: int, workload: Workload) -> PartCosts:
    """A frozen layer and what is trained with it."""
    return replace(
        _frozen(layer),
        num_parameters=layer.num_parameters + num_trained,
        num_trained=num_trained,
        largest_parameter=num_trained,
        flops=layer.flops + 2.0 * workload.num_tokens * num_trained,
        kept_bytes=layer.kept_bytes + (2 * num_trained if workload.arithmetic.is_mixed else 0),
    )
