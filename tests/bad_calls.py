"""Tables of wrong calls: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fusion_moe.errors import Error


def messages(calls: Mapping[str, Callable[[], Any]]) -> str:
    """For a golden: the name of each call, its error's class and message."""
    said = []
    for what, call in calls.items():
        with pytest.raises(Error) as caught:
            call()
        said.append(f"{what}\n    {type(caught.value).__name__}: {caught.value}")
    return "\n".join(said)
