"""What tests of the CPU's tiers share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a file's tests of each tier, those of one run without --all: a compiler takes as long for
    the kernels of each.
    """
    from cpu_tiers import of_file

    tiers = defaultdict[str, dict[str, list[pytest.Item]]](lambda: defaultdict(list))
    for item in items:
        if tier := getattr(item, "callspec", None) and item.callspec.params.get("tier"):
            tiers[item.nodeid.partition("[")[0]][tier].append(item)
    for cells in tiers.values():
        wanted = of_file(next(iter(cells.values()))[0].path)
        for tier in cells.keys() - {wanted if wanted in cells else next(iter(cells))}:
            for item in cells[tier]:
                item.add_marker("exhaustive")


@pytest.fixture(scope="module")
def amx() -> Iterator[None]:
    from cpu_tiers import emulated_amx

    with emulated_amx():
        yield
