"""Encoder–decoders as one row of layers: those of the encoder, then those of the decoder.

    stage      runs                               what crosses the cut behind it
    encoder    the encoder alone                  hidden states; behind its last layer its output, the memory
    decoder    the model, the memory given        hidden states of the decoder, and the memory beside them
    both       the model                          the same

What follows the encoder's layers belongs to the stage of the last one, what precedes the decoder's layers to
that of the first one. Every decoder layer attends to the memory, so every decoder stage gets it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from isthmus.errors import UserError
from isthmus.job.sections import ABNetSpec
from isthmus.model.cut import Arrival, Departure, Seam
from isthmus.model.families import Absent, Decoder, Family
from isthmus.model.modeling_abnet import ABNetConfig, ABNetForTranslation

MODEL_TYPES: Final = ("bart", "marian", "mbart", "mt5", "pegasus", "t5")
JOINED_TYPES: Final = ("bert", "camembert", "electra", "roberta", "xlm-roberta")
"""The encoders that `model.abnet` joins: those that have a causal form, and layers of BERT's shape."""
_ADAPTER: Final = ".adapter."
SHARED: Final = "shared"
"""The embedding that encoder, decoder and head share where they are tied."""
_BEFORE: Final = (
    "embed_tokens",
    "embed_positions",
    "layernorm_embedding",
    "embeddings",
    "embeddings_project",
)
_BEHIND: Final = ("layer_norm", "final_layer_norm")
_LAYERS: Final = ("block", "layers", "encoder")
_INNER: Final = ".layer"
"""Where the layers of an encoder of BERT's shape lie below its own encoder."""


def check_translates(config: PreTrainedConfig) -> None:
    """Refuse a model that is no encoder with a decoder, or that cannot be cut as one."""
    if config.model_type not in (*MODEL_TYPES, ABNetConfig.model_type):
        is_one = bool(config.is_encoder_decoder)
        reason = "is an encoder–decoder of a kind that cannot be cut" if is_one else "is no encoder–decoder"
        raise UserError(
            f"{config.model_type} {reason}, and translation needs one",
            hint=f"take a model of type {', '.join(MODEL_TYPES)}, join two encoders by [model.abnet], or set "
            "another data.task",
        )
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, key, 0):
            raise UserError(
                f"{config.model_type} leaves out whole layers at random, which no stage can decide alone",
                hint=f"set {key} = 0 in [model.config], or in the config.json of the model",
            )


def stacks_of(model: PreTrainedModel) -> Family:
    """Where the parts of an encoder–decoder lie."""
    base = model.base_model
    children = {name: dict(base.get_submodule(name).named_children()) for name in ("encoder", "decoder")}

    def paths(stack: str, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{stack}.{name}" for name in names if name in children[stack])

    (layers,), (decoder_layers,) = (paths(stack, _LAYERS) for stack in ("encoder", "decoder"))
    if model.config.model_type == ABNetConfig.model_type:
        layers, decoder_layers = layers + _INNER, decoder_layers + _INNER
    heads = [name for name, _ in base.named_children() if name not in (*children, SHARED)]
    num_encoder_layers = sum(1 for _ in base.get_submodule(layers).children())
    return Family(
        first=(SHARED, *paths("encoder", _BEFORE)),
        layers=layers,
        last=(*paths("decoder", _BEHIND), *(heads if base is model else ())),
        decoder=Decoder(
            layers=decoder_layers,
            start=num_encoder_layers,
            encoder_end=paths("encoder", _BEHIND),
            first=paths("decoder", _BEFORE),
            # T5 makes its biases by relative position in the first layer of a stack, and all others use them.
            is_joined="block" in layers,
        ),
    )


def drop_stacks(
    model: PreTrainedModel,
    family: Family,
    layers: range,
    seam: Seam,
    *,
    keeps_shared: bool,
    present: Iterable[int] | None = None,
) -> None:
    """Put stand-ins in the place of all that a stage of an encoder–decoder does not own, or nobody uses.

    `present` are its layers, or all.
    """
    base = model.base_model
    modules = dict(base.named_modules())
    dropped = [*_dropped(family, layers, family.num_layers(base))]
    dropped += [(family.layer_path(index), Absent) for index in set(layers).difference(present or layers)]
    if not keeps_shared:
        dropped.append((SHARED, Absent))
    for path, make in dropped:
        if path in modules:
            base.set_submodule(path, make(modules[path], seam))
    if layers.stop < family.num_layers(base):
        for name, _ in model.named_children():
            if base is not model and name != model.base_model_prefix:
                model.set_submodule(name, Absent(model.get_submodule(name)))
        for name, buffer in list(model.named_buffers(recurse=False)):
            model.register_buffer(name, buffer, persistent=False)  # part of the head


def _dropped(family: Family, layers: range, num_layers: int) -> Iterator[tuple[str, type[Absent]]]:
    """The paths of what a stage does not own, each with its stand-in."""
    decoder = family.decoder
    if decoder is None:
        raise ValueError("a model without a decoder has no stacks")
    start = decoder.start
    for index in sorted(set(range(num_layers)).difference(layers)):
        nearest = layers[0] if index < layers.start else layers[-1]
        stand_ins = {layers.start - 1: Arrival, layers.stop: Departure}
        is_called = (index < start) == (nearest < start)
        yield family.layer_path(index), stand_ins.get(index, Absent) if is_called else Absent
    if layers.start > 0:
        yield from ((path, Arrival) for path in family.first)
    if start - 1 not in layers:
        yield from ((path, Absent) for path in decoder.encoder_end)
    if start not in layers:
        yield from ((path, Arrival if layers.start > start else Absent) for path in decoder.first)
    if layers.stop < num_layers:
        yield from ((path, Absent) for path in family.last)


def seed_decoder(decoder: nn.Module, seam: Seam) -> None:
    """Let the dropout of the decoder's embedding depend on nothing that the encoder has drawn."""

    def seed(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        rng_key = seam.current().rng_key
        if rng_key is not None:
            rng_key.seed_place("decoder", kwargs["input_ids"].device)

    decoder.register_forward_pre_hook(seed, with_kwargs=True)


def decoder_inputs(model: PreTrainedModel, labels: Tensor | None) -> Tensor:
    """The ids that a decoder gets which is to say these labels: each position sees those before it."""
    if labels is None:
        raise ValueError("a decoder needs the labels of a micro-batch")
    shift: Any = model
    ids: Tensor = shift.prepare_decoder_input_ids_from_labels(labels)
    return ids


def run_stacks(
    model: PreTrainedModel,
    family: Family,
    layers: range,
    *,
    ids: Tensor,
    mask: Tensor | None,
    labels: Tensor | None,
    memory: Tensor | None,
) -> tuple[Any, Tensor | None]:
    """Run a stage's part of the model; gives its output, and the memory if this stage has it."""
    if family.decoder is None or layers.stop <= family.decoder.start:
        output = model.get_encoder()(input_ids=ids, attention_mask=mask)
        return output, output.last_hidden_state
    source: dict[str, Any] = {"input_ids": ids}
    if memory is not None:
        source = {"encoder_outputs": BaseModelOutput(last_hidden_state=memory)}
    is_last = layers.stop == family.num_layers(model.base_model)
    whole: Any = model if is_last else model.base_model
    output = whole(
        attention_mask=mask, decoder_input_ids=decoder_inputs(model, labels), use_cache=False, **source
    )
    return output, output.encoder_last_hidden_state


def generate_from(model: Any, memory: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """What transformers' own search says of the output of an encoder."""
    whole = torch.ones(memory.shape[:2], dtype=torch.long, device=memory.device)
    ids: Tensor = model.generate(
        encoder_outputs=BaseModelOutput(last_hidden_state=memory),
        attention_mask=whole if mask is None else mask,
        do_sample=False,
        **options,
    )
    return ids


def split_stacks(
    decoder: Decoder, num_layers: int, num_stages: int, memory_cut: int | None
) -> tuple[int, ...]:
    """The number of layers of each stage; encoder and decoder are parted behind stage `memory_cut`.

    Where that is left open, the largest stage is as small as possible.
    """
    if num_stages == 1:
        return (num_layers,)
    sizes = decoder.start, num_layers - decoder.start
    most = (1, 1) if decoder.is_joined else sizes
    found = [
        (*_even(sizes[0], number), *_even(sizes[1], num_stages - number))
        for number in range(1, num_stages)
        if memory_cut in (None, number - 1) and number <= most[0] and num_stages - number <= most[1]
    ]
    if not found:
        why = ": layers of each share a table of positions" if decoder.is_joined else ""
        raise UserError(
            f"{sizes[0]} layers of an encoder and {sizes[1]} of a decoder cannot be {num_stages} stages{why}",
            hint="use 2 clouds: the encoder in the first one, the decoder in the second",
        )
    return min(found, key=max)


def _even(number: int, num_stages: int) -> tuple[int, ...]:
    size, num_larger = divmod(number, num_stages)
    return (size + 1,) * num_larger + (size,) * (num_stages - num_larger)


def untied_embedding(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The embedding that transformers expects beside those of encoder and decoder; nothing uses it."""
    given = {name: one for name, one in weights.items() if name.endswith("encoder.embed_tokens.weight")}
    if not model.config.is_encoder_decoder or model.config.tie_word_embeddings or len(given) != 1:
        return {}
    ((name, weight),) = given.items()
    return {name.replace("encoder.embed_tokens", SHARED): weight.clone()}


# Two encoders that adapters join.

AutoConfig.register(ABNetConfig.model_type, ABNetConfig)
AutoModelForSeq2SeqLM.register(ABNetConfig, ABNetForTranslation)
ABNetConfig.register_for_auto_class()
ABNetForTranslation.register_for_auto_class("AutoModelForSeq2SeqLM")


def joined_config(
    spec: ABNetSpec, encoder: PreTrainedConfig, decoder: PreTrainedConfig, *, ids: Mapping[str, Any]
) -> ABNetConfig:
    """The configuration of two encoders with adapters, or a refusal; `ids` are those of special tokens."""
    for config in (encoder, decoder):
        if config.model_type not in JOINED_TYPES:
            raise UserError(
                f"{config.model_type} cannot be joined with another encoder by adapters",
                hint=f"take encoders of type {', '.join(JOINED_TYPES)}, or leave [model.abnet] out",
            )
    for name in ("hidden_size", "vocab_size"):
        own, other = getattr(encoder, name), getattr(decoder, name)
        if own != other:
            raise UserError(
                f"the encoders that model.abnet joins have {own} and {other} as {name}",
                hint=f"take two of the same {name}; one vocabulary serves both languages",
            )
    layers = {}
    for name, config in (("encoder", encoder), ("decoder", decoder)):
        every = range(config.num_hidden_layers)
        given = getattr(spec, f"{name}_adapters")
        layers[f"{name}_adapters"] = sorted(every if given is None else given)
        if beyond := [one for one in given or () if one not in every]:
            raise UserError(
                f"model.abnet.{name}_adapters names layer {beyond[0]}, and the {name} has {len(every)}",
                hint=f"use 0 to {len(every) - 1}",
            )
    if not layers["decoder_adapters"]:
        raise UserError(
            "no layer of the decoder has an adapter, so that it never sees what it translates",
            hint="name some in model.abnet.decoder_adapters, or leave that out for all",
        )
    start = ids.get("bos_token_id")
    ids = {**ids, "decoder_start_token_id": ids.get("pad_token_id") if start is None else start}
    return ABNetConfig(encoder=encoder, decoder=decoder, adapter_width=spec.adapter_width, **layers, **ids)


def joined_tensors(tensors: Mapping[str, Any], stack: str, *, in_base: str) -> dict[str, Any]:
    """The tensors of a pretrained encoder by their names in `stack` of the joined model."""
    found = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(f"{in_base}.")
        if own.startswith(("embeddings.", "embeddings_project.", "encoder.layer.")):
            place = re.sub(r"^(encoder\.layer\.\d+)", r"\1.layer", own)
            found[f"model.{stack}.{place}"] = tensor
        if stack == "decoder" and own == "embeddings.word_embeddings.weight":
            found["lm_head.weight"] = tensor
    return found


def is_adapter(name: str) -> bool:
    """Whether a parameter of a joined model belongs to an adapter or to the head, less its embedding."""
    return _ADAPTER in name or not name.startswith(("model.", "lm_head.weight"))


def freeze_joined(model: PreTrainedModel) -> None:
    """Train nothing of two joined encoders but adapters and head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def check_learns(config: ABNetConfig, stages: Sequence[range], *, num_frozen: int) -> None:
    """Refuse a stage of joined encoders that has no adapter, and so nothing to learn."""
    start = config.encoder.num_hidden_layers
    adapted = {*config.encoder_adapters, *(start + one for one in config.decoder_adapters)}
    for layers in stages[:-1]:
        if layers.stop > num_frozen and not adapted.intersection(layers):
            raise UserError(
                f"none of the layers {layers.start} to {layers.stop - 1} has an adapter, and nothing else of "
                "their stage is trained",
                hint="name one of them in model.abnet.encoder_adapters or decoder_adapters, or freeze the "
                f"whole encoder: model.frozen_layers = {start}",
            )
