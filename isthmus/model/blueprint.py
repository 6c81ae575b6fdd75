"""What is to be trained, before any weight is in memory: configuration, class, head and where layers lie."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.errors import UserError
from isthmus.job.model_keys import unknown_key
from isthmus.model.anatomy import Anatomy, dissect
from isthmus.model.families import HOW_TO_ADD, family_of
from isthmus.model.families.family import Family
from isthmus.model.heads import HEADS, Head
from isthmus.model.source import Checkpoint, Source

# What the classes of transformers raise when a configuration does not fit together.
_BUILD_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model that can be cut, and the checkpoint it starts from; None for fresh weights."""

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    family: Family
    head: Head
    anatomy: Anatomy
    ties: Mapping[str, str]
    """Parameters that share their values, each with the one it takes them from."""
    checkpoint: Checkpoint | None

    @property
    def num_layers(self) -> int:
        """How many layers can be dealt out to stages."""
        return self.anatomy.num_layers

    @property
    def is_tied_across_layers(self) -> bool:
        """Whether embedding and head share weights, which any cut parts."""
        first, last = self.anatomy.first, self.anatomy.last
        return any(taker in last and giver in first for taker, giver in self.ties.items())


def fresh_blueprint(values: Mapping[str, Any], *, head: Head, num_labels: int | None = None) -> Blueprint:
    """A model from the values of a configuration, as a `[model.config]` table gives them."""
    config = _config_from(dict(values))
    return _draw(config, head=head, num_labels=num_labels, checkpoint=None)


def pretrained_blueprint(name: str, *, head: Head, num_labels: int | None = None) -> Blueprint:
    """A model with its weights, from a folder or the hub."""
    source = Source(name)
    file = source.find("config.json")
    if file is None:
        raise source.unreachable()
    try:
        config = AutoConfig.from_pretrained(file.parent)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise _unusable(name, error) from error
    config.name_or_path = name
    return _draw(config, head=head, num_labels=num_labels, checkpoint=Checkpoint(source))


def _config_from(values: dict[str, Any]) -> PreTrainedConfig:
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        what = "no model_type" if model_type is None else f"an unknown model_type, {model_type!r}"
        hint = _near(str(model_type), CONFIG_MAPPING.keys())
        raise UserError(f"the model's configuration has {what}", hint=hint)
    known = {*CONFIG_MAPPING[model_type]().to_dict(), *CONFIG_MAPPING[model_type].attribute_map}
    if wrong := unknown_key(model_type, values, known):
        what, cure = wrong
        raise UserError(what, hint=cure)
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise _unusable(model_type, error) from error


def _draw(
    config: PreTrainedConfig, *, head: Head, num_labels: int | None, checkpoint: Checkpoint | None
) -> Blueprint:
    if head is HEADS["question-answering"]:
        num_labels = 2  # where an answer begins, and where it ends
    if num_labels is not None:
        config.num_labels = num_labels
    _check(config, head)
    model = _empty_model(config, head)
    family = family_of(model)
    if family.router is None and getattr(config, "output_router_logits", False):
        raise UserError(
            f"the balancing loss of {type(model).__name__} cannot be taken layer by layer",
            hint=f"set output_router_logits = false, or name its router: {HOW_TO_ADD}",
        )
    return Blueprint(
        config=config,
        model_class=type(model),
        family=family,
        head=head,
        anatomy=dissect(model, family),
        ties=model.get_expanded_tied_weights_keys(all_submodels=True),
        checkpoint=checkpoint,
    )


def _check(config: PreTrainedConfig, head: Head) -> None:
    if config.is_encoder_decoder:
        raise UserError(
            f"{config.model_type} is an encoder with a decoder, and cannot be cut yet", hint=HOW_TO_ADD
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{config.name_or_path or config.model_type} holds quantised weights, which cannot be trained",
            hint="start from the model in bfloat16 or float32",
        )
    if head is HEADS["sequence-classification"]:
        if (config.num_labels or 0) < 2:
            raise UserError("a classifier needs at least two labels", hint="set num_labels to 2 or more")
        if config.pad_token_id is None:
            raise UserError(
                f"{config.model_type} has no padding token, so the end of a sequence cannot be found",
                hint="set pad_token_id in the model's configuration",
            )


def _empty_model(config: PreTrainedConfig, head: Head) -> PreTrainedModel:
    if type(config) not in head.auto_class._model_mapping:
        offered = [other.name for other in HEADS.values() if type(config) in other.auto_class._model_mapping]
        raise UserError(
            f"transformers {transformers.__version__} has no {head.name} head for {type(config).__name__}",
            hint=f"choose one of {', '.join(offered)}" if offered else HOW_TO_ADD,
        )
    try:
        with torch.device("meta"):
            model: PreTrainedModel = head.auto_class.from_config(config)
    except _BUILD_ERRORS as error:
        raise _unusable(config.model_type, error) from error
    return model


def _near(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {matches[0]!r}?" if matches else "transformers' documentation lists them"


def _unusable(name: str, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return UserError(
        f"the configuration of {name} cannot be used: {reason[0].strip().removeprefix('ValueError: ')}",
        hint="correct it in [model.config], or in the config.json of the model",
    )
