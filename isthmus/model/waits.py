"""What transformers reads from the device in every forward, and a stage knows without.

To read, the host waits until all that it has queued is computed, and then the device waits for the host.
Where a batch comes without a mask there are two such questions: whether rows hold several sequences, which
shows in positions that start anew, and whether padding was overlooked. A micro-batch says both by itself:
without positions of its own its rows are one sequence each, and without a mask nothing is padded.

A release of transformers that asks otherwise costs time and nothing else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from torch import Tensor
from transformers import PreTrainedModel, masking_utils

_PACKING_QUESTION: Final = "find_packed_sequence_indices"
_PADDING_QUESTION: Final = "warn_if_padding_and_no_attention_mask"
_one_sequence_a_row: ContextVar[bool] = ContextVar("one_sequence_a_row", default=False)


@contextmanager
def one_sequence_a_row(known: bool) -> Iterator[None]:
    """Within it, models of this thread do not look for several, if that is known; all others do as before."""
    token = _one_sequence_a_row.set(known)
    try:
        yield
    finally:
        _one_sequence_a_row.reset(token)


def expect_no_padding(model: PreTrainedModel) -> None:
    """Let this model look for no padding where it gets no mask."""
    for module in model.modules():
        if hasattr(module, _PADDING_QUESTION):
            setattr(module, _PADDING_QUESTION, _ask_nothing)


def _ask_nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _answering(ask: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    def answer(position_ids: Tensor) -> Tensor | None:
        return None if _one_sequence_a_row.get() else ask(position_ids)

    return answer


def _install(module: Any) -> None:
    if hasattr(module, _PACKING_QUESTION):
        setattr(module, _PACKING_QUESTION, _answering(getattr(module, _PACKING_QUESTION)))


_install(masking_utils)
