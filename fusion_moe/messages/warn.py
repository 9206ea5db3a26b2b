"""Warnings that are logged once in a process."""

from __future__ import annotations

import logging

from ..errors import printable

log = logging.getLogger("fusion_moe")
_said: set[str] = set()


def warn_once(message: str, about: str = "") -> None:
    """Logs a warning at most once in a process. about: what several different messages have in
    common; only the first of them is logged.
    """
    key = about or message
    if key not in _said:
        _said.add(key)
        log.warning("%s", printable(message))
