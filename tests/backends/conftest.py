"""What tests of the CPU's tiers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def amx() -> Iterator[None]:
    from cpu_tiers import emulated_amx

    with emulated_amx():
        yield
