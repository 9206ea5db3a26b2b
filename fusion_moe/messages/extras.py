"""How the optional dependencies of this package are installed."""

from __future__ import annotations


def install(extra: str) -> str:
    """What to run for an extra of pyproject.toml. Its name alone would not do: the package is not
    on PyPI.
    """
    return f"pip install '.[{extra}]' in a clone of fusion_moe"
