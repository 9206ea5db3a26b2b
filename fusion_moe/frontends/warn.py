"""Warnings that are logged once."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("fusion_moe")


@functools.lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """A warning, at most once."""
    log.warning("%s", message)
