"""Private behaviour of transformers that stages rely on: its log, checks for padding, and device reads."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep its report and progress bar back: that other stages hold tensors is no news."""
    logger = logging.getLogger("transformers.modeling_utils")
    had_bar = transformers_logging.is_progress_bar_enabled()
    # A filter and not a level: at a higher level the loader does more checks, not fewer.
    logger.addFilter(_is_error)
    progress_bar: Any = transformers_logging
    progress_bar.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(_is_error)
        if had_bar:
            progress_bar.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


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
