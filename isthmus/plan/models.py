"""From a job to its model with costs: measured, from the catalogue that ships with the package, or estimated.

The catalogue has tables of published models (`benchmarks/measure_catalogue.py` makes them), so that these can
be planned without torch. Of any other model the costs are estimated from its sizes, and the plan says so.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.hub import CONFIG_FILE, find_file, no_model
from isthmus.plan.cost_table import CostTable, parsed_table
from isthmus.plan.costs import (
    CostSource,
    Messages,
    ModelCosts,
    PartCosts,
    PlannedModel,
    Task,
    Workload,
    integer_bytes,
    nothing_measured,
)
from isthmus.plan.estimate import estimated_model
from isthmus.plan.job_facts import check_frozen
from isthmus.units import closest

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
"""What of a configuration costs nothing."""
_MAX_CONFIG_BYTES: Final = 16 * 2**20
_ADAPTER_WIDTH: Final = 512
_INSTALL: Final = "install isthmus with its extra train"
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
    check_frozen(num_frozen, num_layers=found.num_layers)
    return found


def has_costs(job: Job, source: CostSource = nothing_measured) -> bool:
    """Whether the costs of the job's model can be measured, or estimated from sizes that are known."""
    return _resolved(model_config(job)).get("hidden_size") is not None or source(job) is not None


def with_task(job: Job, task: Task) -> Job:
    """The job of another task, all of whose model is trained."""
    model = None if job.model is None else job.model.model_copy(update={"frozen_layers": 0, "lora": None})
    data = None if job.data is None else job.data.model_copy(update={"task": task.value})
    return job.model_copy(update={"model": model, "data": data})


def model_config(job: Job) -> Mapping[str, object]:
    """The configuration of the job's model."""
    if job.model is None:
        raise UserError("the job has no [model] section", hint="docs/job.md shows what it holds")
    if job.model.source is None:
        return job.model.config or {}
    config = load_config(job.model.source)
    if config.get("quantization_config") is not None:
        raise UserError(
            f"{job.model.source} holds quantised weights, which cannot be trained",
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
    sizes = table.sizes
    return PlannedModel(
        costs_of=costs_of,
        num_layers=len(sizes.kinds),
        width=sizes.width,
        vocabulary_size=sizes.vocabulary_size,
        messages=table.messages,
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
    family = _families().get(str(model_type))
    if model_type is None:
        raise UserError("the model's configuration has no model_type", hint='set it, such as "llama"')
    if family is None and values.get("hidden_size") is None:
        meant = closest(str(model_type), _families())
        raise UserError(
            f"the costs of model_type {model_type!r} are not known",
            hint=f"did you mean {meant!r}?"
            if meant
            else "install isthmus with its extra train, which measures them",
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
