"""All private parts of transformers that the room calls: its log, padding, initial weights, mappings.

`isthmus.model` checks their names when it is imported. Tested with transformers 5.22.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.utils import logging as transformers_logging

from isthmus.errors import UserError
from isthmus.model.random import CPU, seed_from, seed_generators


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
            setattr(module, _PADDING_QUESTION, lambda *_args, **_options: None)


def _answering(ask: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    def answer(position_ids: Tensor) -> Tensor | None:
        return None if _one_sequence_a_row.get() else ask(position_ids)

    return answer


masking_utils.find_packed_sequence_indices = _answering(masking_utils.find_packed_sequence_indices)


def seed_initialisation(model: PreTrainedModel, seed: int) -> None:
    """Let the model's own initialisation start the generator anew for each module."""
    names = {module: name for name, module in model.named_modules()}

    def seeded(initialise: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def run(module: nn.Module) -> None:
            _spoil(module)
            seed_generators(seed_from("weights", seed, names[module]), CPU)
            initialise(module)

        return run

    for part in _parts(model):
        part._init_weights = seeded(part._init_weights)


def end_seeding(model: PreTrainedModel) -> None:
    """Give the model its own initialisation back."""
    for part in _parts(model):
        del part._init_weights


def check_initialised(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Some classes set values as they are built, on the meta device in vain, and forget them afterwards."""
    for name in sorted(names):
        if torch.isnan(model.get_parameter_or_buffer(name)).any():
            raise UserError(
                f"transformers gives {name} of {type(model).__name__} no initial value",
                hint="start from pretrained weights",
            )


def _spoil(module: nn.Module) -> None:
    """Put NaN where nothing has been loaded, so that what stays without a value is seen."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if tensor.is_floating_point() and not getattr(tensor, "_is_hf_initialized", False):
            tensor.fill_(math.nan)


def _parts(model: PreTrainedModel) -> list[Any]:
    """The model and the models inside it, each of which initialises its own modules."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def forget_layout(model: PreTrainedModel) -> None:
    """Drop the loader's note that it met no other layout, which would keep exports from using the hub's."""
    del model._weight_conversions


def has_head(auto_class: Any, config: PreTrainedConfig) -> bool:
    """Whether transformers has a class for this task and this configuration."""
    return type(config) in auto_class._model_mapping
