"""Error feedback: what one message lost is added to the next, so that nothing is lost for good."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, Payload, State, below
from isthmus.errors import UserError

_RESIDUAL: Final = "residual"
_REST: Final = "rest."


class FeedbackCoder:
    """Wraps the coders whose losses it makes good; all its training messages have one shape."""

    def __init__(self, decay: float, *, rest: Coder) -> None:
        self._decay = decay
        self._rest = rest
        self._residual_ND: Tensor | None = None

    def encode(self, x_ND: Tensor, message: CodedMessage) -> Payload:
        """The rows with what the message before has lost; in evaluation as they are."""
        if not message.learns:
            return self._rest.encode(x_ND, message)
        whole_ND = x_ND.float() + self._owed(x_ND)
        payload = self._rest.encode(whole_ND, message)
        arrives_ND = self._rest.decode(iter(payload), (x_ND.shape[0], x_ND.shape[1]), message)
        lost_ND = whole_ND - arrives_ND
        # What is not finite has crossed as such; to add it again would spoil every later message.
        self._residual_ND = torch.where(lost_ND.isfinite(), lost_ND, 0)
        return payload

    def decode(self, parts: Iterator[Tensor], shape: tuple[int, int], message: CodedMessage) -> Tensor:
        """The rows as the coders behind decode them."""
        return self._rest.decode(parts, shape, message)

    def state_dict(self) -> State:
        """What is still owed."""
        state = {_REST + name: one for name, one in self._rest.state_dict().items()}
        return state if self._residual_ND is None else state | {_RESIDUAL: self._residual_ND.clone()}

    def load_state_dict(self, state: State) -> None:
        """Continue with what was owed when the state was taken."""
        self._residual_ND = state.get(_RESIDUAL)
        self._rest.load_state_dict(below(_REST, state))

    def _owed(self, x_ND: Tensor) -> Tensor:
        residual_ND = self._residual_ND
        if residual_ND is None:
            return x_ND.new_zeros((), dtype=torch.float32)
        if residual_ND.shape != x_ND.shape:
            raise UserError(
                f"feedback needs messages of one shape: this one has {len(x_ND)} rows, the one before had "
                f"{len(residual_ND)}",
                hint="leave feedback out of the link's codec, or make all micro-batches equally long",
            )
        return self._decay * residual_ND.to(x_ND.device)
