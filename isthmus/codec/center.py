"""The mean row of a message crosses by itself, so that scales are those of what differs between tokens.

Hidden states of language models have a few dimensions that are large for every token. Integers would spend
their range on them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus.codec.base import Message, Payload, Wrapping, flat_bytes, from_bytes


class CenterCoder(Wrapping):
    """The mean in bfloat16, then the parts of what is left."""

    def encode(self, x_ND: Tensor, message: Message) -> Payload:
        """One part more than what is left has; a column that is not finite keeps what it has."""
        if len(x_ND) == 0:
            return (x_ND.new_empty(0, dtype=torch.uint8), *self._rest.encode(x_ND, message))
        mean_D = x_ND.mean(0).to(torch.bfloat16).nan_to_num(0.0, 0.0, 0.0)
        return (flat_bytes(mean_D), *self._rest.encode(x_ND - mean_D.to(torch.float32), message))

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: Message) -> Tensor:
        """The matrix with its mean back."""
        mean_D = from_bytes(next(parts), torch.bfloat16).to(torch.float32)
        y_ND = self._rest.decode(parts, shape, message)
        return y_ND + mean_D if len(y_ND) else y_ND
