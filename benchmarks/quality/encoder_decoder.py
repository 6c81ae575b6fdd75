"""A small translation model of two parts: the encoder before the cut, the decoder behind it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from torch import Tensor, nn

from quality.prepare import BOS, EOS, PAD

Cache = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the model is; both parts have `num_layers`."""

    num_tokens: int
    width: int
    num_heads: int
    num_layers: int
    max_length: int
    dropout: float


class Attention(nn.Module):
    """Many heads over a few tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._num_heads = size.num_heads
        self.query = nn.Linear(size.width, size.width)
        self.key_value = nn.Linear(size.width, 2 * size.width)
        self.output = nn.Linear(size.width, size.width)

    def remember(self, x_BTD: Tensor) -> Cache:
        """Keys and values, of shape (batch, heads, tokens, width of a head)."""
        key, value = self.key_value(x_BTD).chunk(2, -1)
        return self._split(key), self._split(value)

    def forward(
        self, x_BTD: Tensor, cache: Cache, *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """What each token finds among the keys."""
        found = F.scaled_dot_product_attention(
            self._split(self.query(x_BTD)), *cache, attn_mask=mask, is_causal=is_causal
        )
        mixed: Tensor = self.output(found.transpose(1, 2).flatten(2))
        return mixed

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], self._num_heads, -1).transpose(1, 2)


class Feed(nn.Sequential):
    """Two linear layers with a bend between them."""

    def __init__(self, size: Size) -> None:
        super().__init__(
            nn.Linear(size.width, 4 * size.width), nn.ReLU(), nn.Linear(4 * size.width, size.width)
        )


class EncoderLayer(nn.Module):
    """Attention among the source's tokens, and a feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.attention = Attention(size)
        self.feed = Feed(size)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BSD: Tensor, mask: Tensor) -> Tensor:
        """One layer."""
        normed = self.norms[0](x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(normed, self.attention.remember(normed), mask=mask))
        fed: Tensor = x_BSD + self.dropout(self.feed(self.norms[1](x_BSD)))
        return fed


class DecoderLayer(nn.Module):
    """Attention to what was said, attention to the source, and a feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(3))
        self.own = Attention(size)
        self.other = Attention(size)
        self.feed = Feed(size)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BTD: Tensor, memory: Cache, mask: Tensor, past: Cache | None) -> tuple[Tensor, Cache]:
        """One layer, and the keys and values of all that was said so far."""
        normed = self.norms[0](x_BTD)
        said = self.own.remember(normed)
        if past is not None:
            said = torch.cat((past[0], said[0]), 2), torch.cat((past[1], said[1]), 2)
        x_BTD = x_BTD + self.dropout(self.own(normed, said, is_causal=past is None))
        x_BTD = x_BTD + self.dropout(self.other(self.norms[1](x_BTD), memory, mask=mask))
        return x_BTD + self.dropout(self.feed(self.norms[2](x_BTD))), said


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.num_tokens, size.width)
        self.places = nn.Embedding(size.max_length, size.width)
        self.dropout = nn.Dropout(size.dropout)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=size.width**-0.5)
        self._scale = size.width**0.5

    def forward(self, ids_BT: Tensor, start: int = 0) -> Tensor:
        """Hidden states of ids that begin at a place."""
        places = self.places.weight[start : start + ids_BT.shape[1]]
        hidden: Tensor = self.dropout(self._scale * (self.tokens(ids_BT) + places))
        return hidden


class Encoder(nn.Module):
    """The part before the cut: what it gives crosses."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = Embedding(size)
        self.layers = nn.ModuleList(EncoderLayer(size) for _ in range(size.num_layers))

    def forward(self, source_BS: Tensor) -> Tensor:
        """Of shape (batch, source tokens, width); the norm behind the last layer is on the other side."""
        mask = source_mask(source_BS)
        x_BSD: Tensor = self.embedding(source_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, mask)
        return x_BSD


class Decoder(nn.Module):
    """The part behind the cut: every layer attends to what crossed."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = Embedding(size)
        self._layers = [DecoderLayer(size) for _ in range(size.num_layers)]
        self.layers = nn.ModuleList(self._layers)
        self.memory_norm = nn.LayerNorm(size.width)
        self.norm = nn.LayerNorm(size.width)

    def forward(self, memory_BSD: Tensor, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Scores of the next token at each place, the target known."""
        mask = source_mask(source_BS)
        memory_BSD = self.memory_norm(memory_BSD)
        said_BT = F.pad(target_BT[:, :-1], (1, 0), value=BOS)
        x_BTD = self.embedding(said_BT)
        for layer in self._layers:
            x_BTD, _ = layer(x_BTD, layer.other.remember(memory_BSD), mask, None)
        return self._scores(x_BTD)

    def translate(self, memory_BSD: Tensor, source_BS: Tensor, max_tokens: int) -> Tensor:
        """The likeliest token each time, and so on until all have ended; padding behind the ends."""
        mask = source_mask(source_BS)
        memory_BSD = self.memory_norm(memory_BSD)
        memories = [layer.other.remember(memory_BSD) for layer in self._layers]
        past: list[Cache | None] = [None for _ in self.layers]
        token_B1 = torch.full_like(source_BS[:, :1], BOS)
        has_ended = torch.zeros_like(token_B1, dtype=torch.bool)
        said = []
        for place in range(max_tokens):
            x_B1D = self.embedding(token_B1, place)
            for index, layer in enumerate(self._layers):
                x_B1D, past[index] = layer(x_B1D, memories[index], mask, past[index])
            token_B1 = self._scores(x_B1D).argmax(-1).masked_fill(has_ended, PAD)
            said.append(token_B1)
            has_ended = has_ended | (token_B1 == EOS)
        return torch.cat(said, 1)

    def _scores(self, x_BTD: Tensor) -> Tensor:
        return F.linear(self.norm(x_BTD), self.embedding.tokens.weight)


def source_mask(source_BS: Tensor) -> Tensor:
    """Which keys are tokens, as attention takes it."""
    return (source_BS != PAD)[:, None, None, :]
