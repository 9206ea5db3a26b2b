"""What torch's caches of compiled code must know of this library: a digest of its sources. Code
that calls an operation has its schema in it, and that of a backward the programs of its derivative.

`backend="fusion_moe"` has the digest in the uuid of its pass; for any other backend it becomes part
of `torch.compiler.config.cache_key_tag` when an operation is first traced, before a key is made.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import translate


@functools.cache
def library_digest() -> str:
    """A digest of all source files of the library, its translators included."""
    translators = importlib.import_module(translate.BUILTIN).__file__
    assert translators is not None
    digest = hashlib.sha256()
    for root in (Path(__file__).parents[1], Path(translators).parent):
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".cpp", ".cu", ".h", ".cuh"):
                data = path.read_bytes()
                digest.update(f"{path.relative_to(root)} {len(data)} ".encode() + data)
    return digest.hexdigest()


@functools.cache
def tag_caches() -> None:
    """Makes the library's sources part of the key of everything that torch compiles from now on."""
    from torch.compiler import config

    config.cache_key_tag += f" fusion_moe {library_digest()}"


def tagging(fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake of an operation, which tags caches."""

    @functools.wraps(fake)
    def tagged(*args: Any, **kwargs: Any) -> Any:
        tag_caches()
        return fake(*args, **kwargs)

    return tagged
