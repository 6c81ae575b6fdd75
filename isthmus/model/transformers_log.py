"""What transformers says by itself while it loads and saves."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
