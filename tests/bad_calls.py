"""Wrong calls: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fusion_moe.errors import Error


def message(call: Callable[[], Any]) -> str:
    """For a golden: the class of the error and its message."""
    with pytest.raises(Error) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def messages(calls: Mapping[str, Callable[[], Any]]) -> str:
    """The same of each call, below its name."""
    return "\n".join(f"{what}\n    {message(call)}" for what, call in calls.items())
