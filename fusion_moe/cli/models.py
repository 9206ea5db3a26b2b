"""Models of transformers, as commands load them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UnsupportedError
from ..messages.extras import install


@contextmanager
def quietly() -> Iterator[None]:
    """For work with transformers: it shows no progress of its own, and others no warnings.
    UnsupportedError where it is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers.utils import logging as messages
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed", todo=install("models")) from None
    loggers = [logging.getLogger(name) for name in ("transformers", "torch", "torchao")]
    before, bars = [logger.level for logger in loggers], messages.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    messages.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        if bars:
            messages.enable_progress_bar()
