"""What is to be trained, before any weight is in memory: configuration, class, head and where layers lie."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.errors import UserError
from isthmus.job.hub import CONFIG_FILE, code_not_run, find_file, needs_code, no_model
from isthmus.job.sections import ABNetSpec, ModelSpec, unknown_key
from isthmus.model.encoder_decoder import check_translates, joined_config, stacks_of
from isthmus.model.families import (
    BUILD_ERRORS,
    FIRST,
    HOW_TO_ADD,
    LAST,
    MISFITS,
    Family,
    cannot_cut,
    family_of,
)
from isthmus.model.heads import HEADS, Head
from isthmus.model.transformers_calls import has_head
from isthmus.units import closest


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """The sizes of a model's parameters by name: before the layers, in each layer, behind them."""

    first: Mapping[str, int]
    layers: tuple[Mapping[str, int], ...]
    last: Mapping[str, int]

    @property
    def num_layers(self) -> int:
        """How many layers can be split over stages."""
        return len(self.layers)

    def owned_by(self, layers: range) -> Mapping[str, int]:
        """The parameters of the stage that holds these layers."""
        owned = dict(self.first) if layers.start == 0 else {}
        for layer in layers:
            owned.update(self.layers[layer])
        if layers.stop == self.num_layers:
            owned.update(self.last)
        return owned


def layout_of(model: PreTrainedModel, family: Family) -> ParameterLayout:
    """Place every parameter of a model; one that has no place makes the model unsupported."""
    places: dict[int, dict[str, int]] = defaultdict(dict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = family.place_of(name, model)
        if place is None:
            raise cannot_cut(type(model).__name__, f"{name} belongs to no stage")
        places[place][name] = parameter.numel()
    layers = tuple(places[index] for index in range(family.num_layers(model.base_model)))
    return ParameterLayout(first=places[FIRST], layers=layers, last=places[LAST])


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Split layers over stages as evenly as possible; the earlier stages take one more."""
    if not 1 <= num_stages <= num_layers:
        raise UserError(
            f"a model of {num_layers} layers cannot be cut into {num_stages} stages",
            hint=f"use 1 to {num_layers} stages",
        )
    size, num_larger = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, num_larger) for stage in range(num_stages + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


def check_layers(layers: range, num_layers: int) -> None:
    """A stage holds one or more layers of the model, in their order."""
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= num_layers:
        raise UserError(
            f"no stage can hold the layers from {layers.start} to before {layers.stop}",
            hint=f"the model has layers 0 to {num_layers - 1}, and a stage holds at least one of them",
        )


# Every configuration takes them, whether it lists them or not.
_TOKEN_IDS: Final = {"bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model that can be cut, and the folder or name of its weights; None for fresh ones."""

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    family: Family
    head: Head
    layout: ParameterLayout
    ties: Mapping[str, str]
    """Parameters that share their values, each with the one it takes them from."""
    source: str | None
    trust_remote_code: bool = False
    """Whether code that came with the configuration may run."""
    whole: str | None = None
    """The class of a configuration of which this model is only the text part."""
    abnet: ABNetSpec | None = None
    """How two encoders are joined, of which `source` is the first."""

    @property
    def num_layers(self) -> int:
        """How many layers can be split over stages."""
        return self.layout.num_layers

    @property
    def num_encoder_layers(self) -> int:
        """How many of them are an encoder's before a decoder; 0 for other models."""
        return 0 if self.family.decoder is None else self.family.decoder.start

    @property
    def is_tied_across_layers(self) -> bool:
        """Whether embedding and head share weights, which any cut parts."""
        if self.family.decoder is not None:
            return bool(self.ties)
        first, last = self.layout.first, self.layout.last
        return any(taker in last and giver in first for taker, giver in self.ties.items())

    @property
    def brings_code(self) -> bool:
        """Whether the model's class is not transformers' own."""
        return not self.model_class.__module__.startswith("transformers.")

    @property
    def mixes_tokens(self) -> bool:
        """Whether what is computed for a token depends on others of its batch, padding among them."""
        # Routers sort tokens by their values, and all families name them, or their experts, by these words.
        names = (name for layer in self.layout.layers for name in layer)
        return any("expert" in name or "router" in name for name in names)


def fresh_blueprint(values: Mapping[str, Any], *, head: Head, num_labels: int | None = None) -> Blueprint:
    """A model from the values of a configuration, as a `[model.config]` table gives them."""
    config = _config_from(dict(values))
    return _draw(config, head=head, num_labels=num_labels, source=None)


def pretrained_blueprint(
    name: str, *, head: Head, num_labels: int | None = None, trust_remote_code: bool = False
) -> Blueprint:
    """A model with its weights, from a folder or the hub; code that it brings is not run unless trusted."""
    return _draw(
        read_config(name, trust_remote_code=trust_remote_code),
        head=head,
        num_labels=num_labels,
        source=name,
        trust_remote_code=trust_remote_code,
    )


def joined_blueprint(
    model: ModelSpec, abnet: ABNetSpec, *, values: Mapping[str, Any], head: Head
) -> Blueprint:
    """Two encoders that adapters join; `values` are what their configurations take from the data."""
    if model.source is not None:
        names = (model.source, abnet.decoder or model.source)
        both = [read_config(name, trust_remote_code=False) for name in names]
    else:
        tables = (model.config or {}, abnet.decoder_config or model.config or {})
        known = {key: one for key, one in values.items() if key != "decoder_start_token_id"}
        both = [_config_from({**table, **known}) for table in tables]
    ids = {key: values.get(key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = joined_config(abnet, *both, ids=ids)
    found = _draw(config, head=head, num_labels=None, source=model.source)
    return replace(found, abnet=abnet)


def read_config(name: str, *, trust_remote_code: bool) -> Any:
    """The configuration of a model in a folder or on the hub."""
    file = find_file(name, CONFIG_FILE)
    if file is None:
        raise no_model(name)
    try:
        # Of a model on the hub the configuration alone is here, and code would have to be fetched by name.
        place = name if trust_remote_code else file.parent
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise (code_not_run(name) if needs_code(error) else _unusable(name, error)) from error
    config.name_or_path = name
    return config


def _config_from(values: dict[str, Any]) -> PreTrainedConfig:
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        what = "no model_type" if model_type is None else f"an unknown model_type, {model_type!r}"
        meant = closest(str(model_type), CONFIG_MAPPING.keys())
        hint = f"did you mean {meant!r}?" if meant else "transformers' documentation lists them"
        raise UserError(f"the model's configuration has {what}", hint=hint)
    try:
        known = {*CONFIG_MAPPING[model_type]().to_dict(), *CONFIG_MAPPING[model_type].attribute_map}
    except StrictDataclassError:
        known = set(values)  # no defaults fit together
    known |= _TOKEN_IDS
    if wrong := unknown_key(model_type, values, known):
        what, cure = wrong
        raise UserError(what, hint=cure)
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise _unusable(model_type, error) from error


def _draw(
    config: PreTrainedConfig,
    *,
    head: Head,
    num_labels: int | None,
    source: str | None,
    trust_remote_code: bool = False,
) -> Blueprint:
    _check_whole(config)
    config, whole = _text_part(config, head)
    if head is HEADS["question-answering"]:
        num_labels = 2  # where an answer begins, and where it ends
    if num_labels is not None:
        config.num_labels = num_labels
    _check(config, head, trust_remote_code=trust_remote_code)
    model = _empty_model(config, head, trust_remote_code=trust_remote_code)
    if type(model).__module__.startswith("transformers.") and not has_head(head.auto_class, model.config):
        raise cannot_cut(type(model).__name__, "transformers loads it only together with its other parts")
    config = model.config
    family = stacks_of(model) if config.is_encoder_decoder else family_of(model)
    if family.router is None and getattr(config, "output_router_logits", False):
        raise UserError(
            f"the balancing loss of {type(model).__name__} cannot be taken layer by layer",
            hint=f"set output_router_logits = false, or name its router: {HOW_TO_ADD}",
        )
    if head is HEADS["causal-lm"] and _sees_ahead(model, family):
        raise UserError(
            f"{config.model_type} is an encoder, in which every token sees those behind it: trained for "
            f"causal-lm it would see its targets",
            hint='set data.task = "masked-lm"; a fresh one that is to be a decoder needs is_decoder = true',
        )
    return Blueprint(
        config=config,
        model_class=type(model),
        family=family,
        head=head,
        layout=layout_of(model, family),
        ties=model.get_expanded_tied_weights_keys(all_submodels=True),
        source=source,
        trust_remote_code=trust_remote_code,
        whole=whole,
    )


def _text_part(config: PreTrainedConfig, head: Head) -> tuple[PreTrainedConfig, str | None]:
    """The text part of a model for pictures or sound as well, and that model's class; else the whole."""
    text: Any = getattr(config, "text_config", None)
    if not isinstance(text, PreTrainedConfig) or not has_head(head.auto_class, text):
        return config, None
    text.name_or_path = config.name_or_path
    if getattr(config, "tie_word_embeddings", False):
        text.tie_word_embeddings = True
    return text, type(config).__name__


def _sees_ahead(model: PreTrainedModel, family: Family) -> bool:
    """Whether a token attends to those behind it, as in all that can fill gaps, unless it is a decoder."""
    if getattr(model.config, "is_decoder", False):
        return False
    fills_gaps = has_head(HEADS["masked-lm"].auto_class, model.config)
    modules = model.base_model.get_submodule(family.layers).modules()
    return fills_gaps or any(getattr(module, "is_causal", True) is False for module in modules)


def _check_whole(config: PreTrainedConfig) -> None:
    if config.model_type in MISFITS:
        raise cannot_cut(type(config).__name__, MISFITS[config.model_type])
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{config.name_or_path or config.model_type} holds quantised weights, which cannot be trained",
            hint="start from the model in bfloat16 or float32",
        )


def _check(config: PreTrainedConfig, head: Head, *, trust_remote_code: bool) -> None:
    if head is HEADS["translation"]:
        check_translates(config)
    elif config.is_encoder_decoder:
        reason = f"it is an encoder with a decoder, which is trained for translation, not for {head.name}"
        raise cannot_cut(type(config).__name__, reason)
    brings_class = trust_remote_code and head.auto_class.__name__ in getattr(config, "auto_map", {})
    if not has_head(head.auto_class, config) and not brings_class:
        offered = [other.name for other in HEADS.values() if has_head(other.auto_class, config)]
        raise UserError(
            f"transformers {transformers.__version__} has no {head.name} head for {type(config).__name__}",
            hint=f"choose one of {', '.join(offered)}" if offered else "language models alone can be trained",
        )
    if head is HEADS["sequence-classification"]:
        if (config.num_labels or 0) < 2:
            raise UserError("a classifier needs at least two labels", hint="set num_labels to 2 or more")
        if getattr(config, "pad_token_id", None) is None:
            raise UserError(
                f"{config.model_type} has no padding token, so the end of a sequence cannot be found",
                hint="set pad_token_id in the model's configuration",
            )


def _empty_model(config: PreTrainedConfig, head: Head, *, trust_remote_code: bool) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = head.auto_class.from_config(config, trust_remote_code=trust_remote_code)
            head.prepare(model)
    except BUILD_ERRORS as error:
        raise _unusable(type(config).__name__, error) from error
    return model


def _unusable(name: str, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [""])[-1].strip().removeprefix("ValueError: ")
    if isinstance(error, LookupError | AttributeError | TypeError):
        reason = f"transformers fails to build the model from it ({type(error).__name__}: {reason})"
    return UserError(
        f"the configuration of {name} cannot be used: {reason}",
        hint="correct it in [model.config], or in the config.json of the model",
    )
