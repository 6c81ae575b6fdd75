"""Initial values that no cut changes: a module's depend on the seed and its full name alone."""

import copy
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from isthmus.errors import UserError
from isthmus.job.codec import BottleneckSpec, BoundarySpec, HiddenSpec
from isthmus.job.hub import INDEX_FILE, WEIGHTS_FILE, find_file
from isthmus.job.sections import LoraSpec
from isthmus.model.blueprint import Blueprint, check_layers
from isthmus.model.bottleneck import Down, Half, Up
from isthmus.model.cut import LayerCall, Seam, drop_absent
from isthmus.model.encoder_decoder import (
    drop_stacks,
    freeze_joined,
    is_adapter,
    joined_tensors,
    seed_decoder,
)
from isthmus.model.feed_forward import (
    FeedForwardDown,
    FeedForwardUp,
    check_within,
    lies_within,
    parted,
    put_behind,
    take_off,
)
from isthmus.model.lora import add_adapters
from isthmus.model.random import CPU, generators_kept, seed_from
from isthmus.model.recompute import Fixed
from isthmus.model.stage import Stage, freeze_below
from isthmus.model.transformers_calls import (
    check_initialised,
    end_seeding,
    expect_no_padding,
    forget_layout,
    quiet_transformers,
    seed_initialisation,
)

_HIDDEN = HiddenSpec()


def build_stage(
    blueprint: Blueprint,
    layers: range,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    untie: bool = False,
    inbound: BoundarySpec = _HIDDEN,
    outbound: BoundarySpec = _HIDDEN,
    num_frozen_layers: int = 0,
    lora: LoraSpec | None = None,
) -> Stage:
    """A stage in training mode, on the CPU; how the model is cut changes no value it starts with.

    Weights that embedding and head share stay shared only in a stage that holds all layers, unless `untie`.
    `inbound` and `outbound` are the boundaries at its cuts; frozen layers count from the model's first. With
    `lora` only adapters learn, the halves of bottlenecks, and a head that the checkpoint lacks.
    """
    check_layers(layers, blueprint.num_layers)
    is_whole = layers == range(blueprint.num_layers)
    untied = blueprint.is_tied_across_layers and (untie or not is_whole)
    seam = Seam(model_class=blueprint.model_class.__name__, learns_aside=blueprint.family.decoder is not None)
    up = _half(blueprint, inbound, Up, FeedForwardUp, at_layer=layers.start)
    down = _half(
        blueprint,
        outbound,
        Down,
        FeedForwardDown,
        at_layer=layers.stop,
        seed=seed_from("bottleneck", seed, layers.stop),
    )
    is_behind = isinstance(up, FeedForwardUp)
    model, new_names = _load(
        blueprint, layers, seam=seam, seed=seed, dtype=dtype, untied=untied, is_behind=is_behind
    )
    if isinstance(up, FeedForwardUp):
        up.take(model.base_model.get_submodule(blueprint.family.layer_path(layers.start - 1)))
    if isinstance(down, FeedForwardDown):
        take_off(model, blueprint.family, layers.stop - 1, down)
    stage = assemble(
        blueprint,
        model,
        layers,
        seam,
        num_frozen_layers=num_frozen_layers,
        lora=lora,
        new_names=new_names,
        seed=seed,
        notes=_notes(blueprint, untied=untied, new_names=new_names, num_frozen_layers=num_frozen_layers),
        up=up,
        down=down,
    )
    stage.recompute = Fixed(frozenset(layers if recompute else ()))
    return stage


def assemble(
    blueprint: Blueprint,
    model: PreTrainedModel,
    layers: range,
    seam: Seam,
    *,
    present: Sequence[int] | None = None,
    num_frozen_layers: int = 0,
    lora: LoraSpec | None = None,
    new_names: Sequence[str] = (),
    seed: int = 0,
    **parts: Any,
) -> Stage:
    """A stage around a model whose other parts are stand-ins; `present` are its layers, all unless given.

    With `lora` parameters with new names, such as a new head's, are trained beside the adapters.
    """
    in_base = "" if model.base_model is model else f"{model.base_model_prefix}."
    paths = {index: f"{in_base}{blueprint.family.layer_path(index)}" for index in present or layers}
    adapters = None
    if lora is not None:
        fresh = [name for name, _ in model.named_parameters() if name in new_names]
        adapters = add_adapters(
            model,
            lora,
            layer_paths=[*paths.values()],
            head=blueprint.head,
            has_experts=blueprint.family.has_experts,
            fresh_names=fresh,
            seed=seed,
        )
    stage = Stage(model.train(), blueprint, layers=layers, seam=seam, adapters=adapters, **parts)
    for index, path in paths.items():
        layer = model.get_submodule(path)
        layer.forward = LayerCall(layer, index=index, seam=seam, router=stage.router)
    if blueprint.family.decoder is not None:
        seed_decoder(model.base_model.get_submodule("decoder"), seam)
    if blueprint.abnet is not None and blueprint.abnet.frozen:
        freeze_joined(model)
    freeze_below(stage, num_frozen_layers)
    return stage


def _half(
    blueprint: Blueprint,
    spec: BoundarySpec,
    between: type[Half],
    within: type[Half],
    *,
    at_layer: int,
    **more: Any,
) -> Any:
    """A stage's half of the bottleneck before a layer, or None where hidden states cross as they are."""
    if not isinstance(spec, BottleneckSpec):
        return None
    if not 0 < at_layer < blueprint.num_layers:
        raise ValueError("a bottleneck lies between two stages, not at an end of the model")
    config = blueprint.config
    spec.check_width(config.hidden_size)
    check_within(spec, config)
    make: Any = within if lies_within(spec) else between
    return make(spec, width=config.hidden_size, vocabulary_size=config.vocab_size, **more)


def _load(
    blueprint: Blueprint,
    layers: range,
    *,
    seam: Seam,
    seed: int,
    dtype: torch.dtype,
    untied: bool,
    is_behind: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """Let transformers' own loader fill what the stage keeps, and initialise what the checkpoint lacks."""

    def prepare(model: PreTrainedModel) -> None:
        blueprint.head.prepare(model)
        parts = parted(model, blueprint.family, layers.start - 1) if is_behind else []
        if blueprint.family.decoder is None:
            drop_absent(model, blueprint.family, layers, seam)
        else:
            keeps_shared = bool(blueprint.ties) and not untied
            drop_stacks(model, blueprint.family, layers, seam, keeps_shared=keeps_shared)
        if is_behind:
            put_behind(model, blueprint.family, layers.start - 1, parts)
        seed_initialisation(model, seed)

    config = copy.deepcopy(blueprint.config)
    if untied:
        config.tie_word_embeddings = False
    stage_class = _prepared_class(blueprint.model_class, prepare)
    with quiet_transformers(), generators_kept(CPU):
        loaded: Any = stage_class.from_pretrained(
            None,
            config=config,
            state_dict=_tensors(blueprint, untied=untied),
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, report = loaded
    model.__class__ = blueprint.model_class
    end_seeding(model)
    expect_no_padding(model)
    check_initialised(model, report["missing_keys"])
    if blueprint.source is None:
        forget_layout(model)
    return model, _check_report(blueprint, report)


def _prepared_class(
    model_class: type[PreTrainedModel], prepare: Callable[[PreTrainedModel], None]
) -> type[PreTrainedModel]:
    """The model's class, prepared as soon as it is built, which its loader does on the meta device."""

    def init(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        model_class.__init__(self, config)
        prepare(self)

    return type(
        model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__}
    )


def _tensors(blueprint: Blueprint, *, untied: bool) -> "Mapping[str, PretrainedTensor]":
    if blueprint.source is None:
        return {}
    tensors = Checkpoint(blueprint.source).tensors()
    if blueprint.abnet is not None:
        decoder = Checkpoint(blueprint.abnet.decoder or blueprint.source).tensors()
        stacks = {"encoder": tensors, "decoder": decoder}
        bases = {name: _base_prefix(getattr(blueprint.config, name)) for name in stacks}
        joined = (joined_tensors(own, name, in_base=bases[name]) for name, own in stacks.items())
        return {name: one for own in joined for name, one in own.items()}
    in_base = f"{blueprint.model_class.base_model_prefix}."
    if blueprint.whole is not None:
        tensors = {_name_in_text(name, in_base): one for name, one in tensors.items()}
    if untied:
        for taker, giver in blueprint.ties.items():
            found = tensors.get(giver) or tensors.get(giver.removeprefix(in_base))
            if taker not in tensors and found is not None:
                tensors[taker] = found
    return tensors


def _base_prefix(config: PreTrainedConfig) -> str:
    """The name under which models with a head keep the model of this configuration."""
    found: str = MODEL_MAPPING[type(config)].base_model_prefix
    return found


def _name_in_text(name: str, in_base: str) -> str:
    """The name that a parameter of a composite model has in its text part."""
    _, is_text, inner = name.partition("language_model.")
    if not is_text or inner.startswith((in_base, "lm_head.")):
        return inner or name
    return f"{in_base}{inner}"


def _check_report(blueprint: Blueprint, report: Mapping[str, Any]) -> list[str]:
    """The parameters that start fresh beside a checkpoint: a new head may, anything else is a mistake."""
    if blueprint.source is None:
        return []
    name = blueprint.source
    for key, found, expected in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{key} has shape {tuple(found)} in {name}, not {tuple(expected)} as its configuration says",
            hint="give the model's configuration the sizes of its weights (num_labels for a classifier)",
        )
    missing = sorted(report["missing_keys"])
    for key in missing:
        if key not in blueprint.layout.last and not (blueprint.abnet and is_adapter(key)):
            raise UserError(
                f"{name} holds no weights for {key} of {blueprint.model_class.__name__}",
                hint="start from a folder or name that holds the whole model",
            )
    return [] if blueprint.abnet is not None else missing


def _notes(
    blueprint: Blueprint, *, untied: bool, new_names: list[str], num_frozen_layers: int
) -> tuple[str, ...]:
    notes = []
    if blueprint.whole is not None:
        notes.append(f"only the text part of {blueprint.whole} is trained and exported")
    if untied:
        which = "embedding and head" if blueprint.family.decoder is None else "encoder, decoder and head"
        notes.append(f"{which} share weights in this model; they are trained and exported untied")
    elif blueprint.is_tied_across_layers and num_frozen_layers:
        notes.append("embedding and head share weights in this model; both are frozen")
    if new_names:
        notes.append(f"not in the checkpoint, and so started fresh: {', '.join(new_names)}")
    return tuple(notes)


class Checkpoint:
    """The safetensors of a pretrained model, in one file or many."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._files: dict[str, Any] = {}
        # Loaders ask from several threads at once.
        self._lock = threading.Lock()

    def tensors(self) -> "dict[str, PretrainedTensor]":
        """Every tensor by name; none is read, and no shard fetched, before it is asked for."""
        index = find_file(self.source, INDEX_FILE)
        if index is not None:
            return {name: PretrainedTensor(self, file, name) for name, file in _read_index(index).items()}
        if find_file(self.source, WEIGHTS_FILE, is_required=True) is None:
            raise UserError(
                f"{self.source} has no safetensors weights",
                hint="pickled weights are never loaded: convert them with transformers' save_pretrained",
            )
        return {name: PretrainedTensor(self, WEIGHTS_FILE, name) for name in self.open(WEIGHTS_FILE).keys()}  # noqa: SIM118 not a dict

    def open(self, file: str) -> Any:
        """A file of the checkpoint, opened once."""
        with self._lock:
            if file not in self._files:
                self._files[file] = self._open(file)
            return self._files[file]

    def _open(self, file: str) -> Any:
        path = find_file(self.source, file, is_required=True)
        if path is None:
            raise UserError(f"{self.source} lacks {file}, which its index names", hint="fetch it again")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path} is no safetensors file: {error}", hint="fetch it again") from None


@dataclass(frozen=True, slots=True)
class PretrainedTensor:
    """A tensor in a checkpoint, read when it is indexed, as transformers' loader does."""

    checkpoint: Checkpoint
    file: str
    name: str

    def __getitem__(self, index: EllipsisType | slice | tuple[slice, ...]) -> Tensor:
        try:
            # safetensors gives every reader the same memory, that of the file; a model trains in its own.
            tensor: Tensor = self.checkpoint.open(self.file).get_slice(self.name)[index].clone()
        except SafetensorError as error:
            raise UserError(
                f"{self.name} cannot be read from {self.file} of {self.checkpoint.source}: {error}",
                hint="fetch the file again",
            ) from None
        return tensor


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        files = json.loads(path.read_bytes())["weight_map"]
        named = {str(name): Path(file).name for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is no index of safetensors", hint="fetch it again") from None
    return named
