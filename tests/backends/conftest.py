"""What tests of the CPU's tiers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a file's tests of each tier, those of two run without --all: a compiler takes as long for
    the kernels of each.
    """
    from cpu_tiers import of_file

    for item in items:
        tier = getattr(item, "callspec", None) and item.callspec.params.get("tier")
        if tier and tier not in of_file(item.path):
            item.add_marker("exhaustive")


@pytest.fixture(scope="module")
def amx() -> Iterator[None]:
    from cpu_tiers import emulated_amx

    with emulated_amx():
        yield
