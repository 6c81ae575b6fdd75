"""Two pretrained encoders as encoder and decoder, frozen, with trained adapters between their layers.

The seed's fine-tuning set-up (ABNet). The encoder's final states are what crosses: every layer of the decoder
attends to them, so the one possible cut lies between the two. An explicit model: each layer of the encoder
has an adapter of two products behind it, each of the decoder cross-attention and a small feed-forward part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from isthmus.errors import UserError
from isthmus.plan.costs.parts import ModelCosts, PartCosts, Workload, model_costs
from isthmus.plan.costs.shapes import ModelShape, Task, read_shape

MODEL_TYPE: Final = "encoder-decoder"
_ADAPTER_WIDTH: Final = 512
# No gradient of frozen weights is made: one of the two products of a backward pass remains.
_BACKWARD_SHARE: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """Encoder and decoder, and how wide the adapters are."""

    encoder: ModelShape
    decoder: ModelShape
    adapter_width: int

    @property
    def num_encoder_layers(self) -> int:
        """Where the cut is."""
        return self.encoder.num_layers

    @property
    def num_layers(self) -> int:
        """Of both."""
        return self.encoder.num_layers + self.decoder.num_layers

    @property
    def width(self) -> int:
        """Of what crosses."""
        return self.encoder.width

    def costs(self, workload: Workload) -> ModelCosts:
        """Both as one model, whose first half is the encoder."""
        encoder, decoder = model_costs(self.encoder, workload), model_costs(self.decoder, workload)
        width, inner = self.decoder.width, self.adapter_width
        adapter = 2 * self.encoder.width * inner
        cross = 4 * width * width + 2 * width * inner
        first, *others = decoder.layers
        adapted = {id(layer): _with(layer, adapter, workload) for layer in encoder.layers}
        attending = {id(layer): _with(layer, cross, workload) for layer in others}
        return replace(
            encoder,
            # Nothing below it learns, so nothing goes back to it.
            embedding=replace(_frozen(encoder.embedding), backward_share=0.0, kept_bytes=0.0),
            layers=(
                *(adapted[id(layer)] for layer in encoder.layers),
                _with(_joined(decoder.embedding, first), cross, workload),
                *(attending[id(layer)] for layer in others),
            ),
            head=replace(decoder.head, backward_share=_BACKWARD_SHARE),
            num_tied_parameters=0,
            arrival_bytes=(*encoder.arrival_bytes, *decoder.arrival_bytes),
        )


def read_encoder_decoder(config: Mapping[str, object]) -> EncoderDecoder:
    """From a configuration with the tables `encoder` and `decoder`, and `adapter_width` if it is given."""
    halves = []
    for key in ("encoder", "decoder"):
        half = config.get(key)
        if not isinstance(half, Mapping):
            raise UserError(
                f"the configuration of an encoder-decoder has no table {key!r}",
                hint=f"add [model.config.{key}] with its model_type and sizes",
            )
        halves.append(read_shape(half, task=Task.MASKED_LM))
    adapter_width = config.get("adapter_width", _ADAPTER_WIDTH)
    if not isinstance(adapter_width, int) or adapter_width < 1:
        raise UserError(f"adapter_width is {adapter_width!r}, not a whole number of at least 1")
    return EncoderDecoder(encoder=halves[0], decoder=halves[1], adapter_width=adapter_width)


def _frozen(part: PartCosts) -> PartCosts:
    return replace(part, num_trained=0, largest_parameter=0, backward_share=_BACKWARD_SHARE)


def _with(layer: PartCosts, num_trained: int, workload: Workload) -> PartCosts:
    """A frozen layer and what is trained with it."""
    frozen = _frozen(layer)
    return replace(
        frozen,
        num_parameters=frozen.num_parameters + num_trained,
        num_trained=num_trained,
        largest_parameter=num_trained,
        flops=frozen.flops + 2.0 * workload.num_tokens * num_trained,
        kept_bytes=frozen.kept_bytes + (2 * num_trained if workload.arithmetic.is_mixed else 0),
    )


def _joined(embedding: PartCosts, layer: PartCosts) -> PartCosts:
    """The decoder's embedding lies with its first layer."""
    return replace(
        layer,
        num_parameters=embedding.num_parameters + layer.num_parameters,
        flops=embedding.flops + layer.flops,
        moved_bytes=embedding.moved_bytes + layer.moved_bytes,
        kept_bytes=embedding.kept_bytes + layer.kept_bytes,
    )
