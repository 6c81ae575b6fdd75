"""Cuts to test codecs on: both ends of one, on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.codec import CodecEnd, Codecs, Key, Payload
from isthmus.job import CodecSpec, parse_codec

CPU = torch.device("cpu")
KEY = Key(step=3, microbatch=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Both ends of a cut."""

    sending: CodecEnd
    receiving: CodecEnd

    def send(self, x_ND: Tensor, key: Key = KEY) -> tuple[Payload, Tensor]:  # noqa: N803
        """What crosses of an activation, and what arrives."""
        payload = self.sending.encode(x_ND, key=key)
        return payload, self.receiving.decode(payload, key=key, num_rows=x_ND.shape[0])

    def send_back(self, g_ND: Tensor, key: Key = KEY) -> tuple[Payload, Tensor]:  # noqa: N803
        """What crosses of a gradient, and what arrives."""
        payload = self.receiving.encode_gradient(g_ND, key=key)
        return payload, self.sending.decode_gradient(payload, key=key, num_rows=g_ND.shape[0])


def make_cut(
    forward: CodecSpec | str, backward: CodecSpec | str = "raw", *, width: int, seed: int = 0
) -> Cut:
    """A cut with these codecs."""
    specs = [parse_codec(one) if isinstance(one, str) else one for one in (forward, backward)]
    codecs = Codecs(forward=specs[0], backward=specs[1], width=width, seed=seed)
    return Cut(sending=CodecEnd(codecs, device=CPU), receiving=CodecEnd(codecs, device=CPU))


def sizes(payload: Payload) -> tuple[int, ...]:
    """Bytes of each part."""
    return tuple(part.numel() for part in payload)


def noise(num_rows: int, width: int, *, seed: int = 0, scale: float = 1.0) -> Tensor:
    """A Gaussian matrix."""
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def activations(num_rows: int, width: int, *, seed: int = 0) -> Tensor:
    """A matrix as models make them: directions of falling weight, a few columns far larger than others."""
    x_ND = noise(num_rows, width, seed=seed) @ (  # noqa: N806
        noise(width, width, seed=7) / torch.arange(1, width + 1).unsqueeze(1)
    )
    x_ND[:, :: max(1, width // 3)] *= 20
    return x_ND
