"""Encoder–decoders as one row of layers: those of the encoder, then those of the decoder.

    stage      runs                               what crosses the cut behind it
    encoder    the encoder alone                  hidden states; behind its last layer its output, the memory
    decoder    the model, the memory given        hidden states of the decoder, and the memory beside them
    both       the model                          the same

What follows the encoder's layers belongs to the stage of the last one, what precedes the decoder's layers to
that of the first one. Every decoder layer attends to the memory, so every decoder stage gets it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from isthmus.errors import UserError
from isthmus.model.cut import Arrival, Departure, Seam
from isthmus.model.families import Absent, Decoder, Family

MODEL_TYPES: Final = ("bart", "marian", "mbart", "mt5", "pegasus", "t5")
SHARED: Final = "shared"
"""The embedding that encoder, decoder and head share where they are tied."""
_BEFORE: Final = ("embed_tokens", "embed_positions", "layernorm_embedding")
_BEHIND: Final = ("layer_norm", "final_layer_norm")
_LAYERS: Final = ("block", "layers")


def check_translates(config: PreTrainedConfig) -> None:
    """Refuse a model that is no encoder with a decoder, or that cannot be cut as one."""
    if config.model_type not in MODEL_TYPES:
        is_one = bool(config.is_encoder_decoder)
        reason = "is an encoder–decoder of a kind that cannot be cut" if is_one else "is no encoder–decoder"
        raise UserError(
            f"{config.model_type} {reason}, and translation needs one",
            hint=f"take a model of type {', '.join(MODEL_TYPES)}, or set another data.task",
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
