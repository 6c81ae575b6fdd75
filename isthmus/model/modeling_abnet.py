"""Two pretrained encoders as encoder and decoder, joined by adapters; both keep their own weights.

    encoder   h ← h + W₂ relu(W₁ norm(h))                           behind each layer
    decoder   h ← h + attention(norm(h), memory); the same again    behind each layer
    head      scores ← E norm(act(W h)) + b                         E: the decoder's own embedding

The attention of the decoder is causal. The memory is the encoder's output.

This file lies beside the weights, so it needs nothing but torch and transformers:

    AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F  # noqa: N812 torch's own custom
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import Seq2SeqLMOutput, Seq2SeqModelOutput

IGNORED = -100


class ABNetConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configurations of both encoders, the width of adapters, and the layers of each that have one."""

    model_type = "isthmus_abnet"
    sub_configs = {"encoder": AutoConfig, "decoder": AutoConfig}  # noqa: RUF012 as transformers declares it

    def __init__(
        self,
        *,
        encoder: Mapping[str, Any] | PreTrainedConfig | None = None,
        decoder: Mapping[str, Any] | PreTrainedConfig | None = None,
        adapter_width: int = 512,
        encoder_adapters: Sequence[int] = (),
        decoder_adapters: Sequence[int] = (),
        **others: Any,
    ) -> None:
        self.encoder: Any = AutoConfig.for_model(**encoder) if isinstance(encoder, Mapping) else encoder
        self.decoder: Any = AutoConfig.for_model(**decoder) if isinstance(decoder, Mapping) else decoder
        if self.decoder is not None:
            self.decoder.is_decoder = True
            # What embeds and scores tokens is the decoder's; so is the width of what crosses.
            self.vocab_size = self.decoder.vocab_size
            self.hidden_size = self.decoder.hidden_size
        self.adapter_width = adapter_width
        self.encoder_adapters = list(encoder_adapters)
        self.decoder_adapters = list(decoder_adapters)
        super().__init__(**{"is_encoder_decoder": True, "tie_word_embeddings": False, **others})


class FeedForward(nn.Module):
    """A narrow feed-forward with its own norm and residual."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, inner_width)
        self.up = nn.Linear(inner_width, width)

    def forward(self, h_BTD: Tensor) -> Tensor:
        inner: Tensor = self.up(F.relu(self.down(self.norm(h_BTD))))
        return h_BTD + inner


class Attention(nn.Module):
    """Attention to the memory, with its own norm and residual."""

    def __init__(self, width: int, memory_width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(memory_width, width)
        self.value = nn.Linear(memory_width, width)
        self.out = nn.Linear(width, width)

    def forward(self, h_BTD: Tensor, memory_BSD: Tensor, mask: Tensor | None) -> Tensor:
        given = (self.query(self.norm(h_BTD)), self.key(memory_BSD), self.value(memory_BSD))
        query, key, value = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in given)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = self.out(found.transpose(1, 2).flatten(-2))
        return h_BTD + out


class EncoderLayer(nn.Module):
    """A layer of the encoder, and its adapter if it has one."""

    def __init__(self, layer: nn.Module, config: ABNetConfig, index: int) -> None:
        super().__init__()
        self.layer = layer
        has_one = index in config.encoder_adapters
        self.adapter = FeedForward(config.encoder.hidden_size, config.adapter_width) if has_one else None

    def forward(self, h_BTD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.layer(h_BTD, *args, **kwargs)
        return found if self.adapter is None else self.adapter(found)


class DecoderLayer(nn.Module):
    """A layer of the decoder, and its adapter if it has one, through which alone it sees the memory."""

    def __init__(self, layer: nn.Module, config: ABNetConfig, index: int) -> None:
        super().__init__()
        self.layer = layer
        self.adapter: nn.ModuleDict | None = None
        width = config.decoder.hidden_size
        if index in config.decoder_adapters:
            heads = config.decoder.num_attention_heads
            attention = Attention(width, config.encoder.hidden_size, heads)
            self.adapter = nn.ModuleDict(
                {"attention": attention, "inner": FeedForward(width, config.adapter_width)}
            )

    def forward(
        self,
        h_BTD: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        found: Tensor = self.layer(h_BTD, attention_mask, **kwargs)
        if self.adapter is None:
            return found
        seen = self.adapter["attention"](found, encoder_hidden_states, encoder_attention_mask)
        given: Tensor = self.adapter["inner"](seen)
        return given


class ABNetPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What transformers asks of a model."""

    config_class = ABNetConfig
    base_model_prefix = "model"
    _supports_sdpa = True


class ABNetModel(ABNetPreTrainedModel):
    """Both encoders with their adapters."""

    def __init__(self, config: ABNetConfig) -> None:
        super().__init__(config)
        self.encoder = self._stack(config.encoder, EncoderLayer)
        self.decoder = self._stack(config.decoder, DecoderLayer)
        self.post_init()

    def _stack(self, config: PreTrainedConfig, adapted: type[Any]) -> Any:
        stack: Any = AutoModel.from_config(config)
        if getattr(stack, "pooler", None) is not None:
            stack.pooler = None
        layers = enumerate(stack.encoder.layer)
        stack.encoder.layer = nn.ModuleList([adapted(one, self.config, index) for index, one in layers])
        return stack

    def get_input_embeddings(self) -> nn.Module:
        """Those of the encoder, which reads the text."""
        found: nn.Module = self.encoder.get_input_embeddings()
        return found

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **_others: Any,
    ) -> Seq2SeqModelOutput:
        """Run the encoder, unless its output is given, and the decoder."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        memory = encoder_outputs[0]
        found = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=memory,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=found.last_hidden_state,
            past_key_values=found.past_key_values,
            encoder_last_hidden_state=memory,
        )


class ABNetForTranslation(ABNetPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The joined encoders with a head that scores the next token."""

    def __init__(self, config: ABNetConfig) -> None:
        super().__init__(config)
        self.model = ABNetModel(config)
        width = getattr(config.decoder, "embedding_size", config.hidden_size)
        self.transform = nn.Linear(config.hidden_size, width)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, config.vocab_size)
        self.post_init()

    def get_encoder(self, *_args: Any, **_options: Any) -> Any:
        """The encoder with its adapters."""
        return self.model.encoder

    def get_output_embeddings(self) -> nn.Module:
        """The scores of tokens."""
        return self.lm_head

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Each position gets the label before it."""
        started = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id)
        return started.masked_fill(started == IGNORED, self.config.pad_token_id)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Seq2SeqLMOutput:
        """Score each next token; with labels also the mean loss."""
        if labels is not None and decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        found = self.model(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            encoder_outputs=encoder_outputs,
            **others,
        )
        logits = self.lm_head(self.norm(F.gelu(self.transform(found.last_hidden_state))))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            encoder_last_hidden_state=found.encoder_last_hidden_state,
        )
