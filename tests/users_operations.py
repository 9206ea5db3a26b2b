"""Operations that a user defines, for the length of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusion_moe.definitions import translate


@contextmanager
def library(namespace: str) -> Iterator[Callable[..., Any]]:
    """A function that defines operations of this namespace: define(name, schema, body, fake) ->
    the operation.

    Afterwards they are gone, with their translators.
    """
    with torch.library._scoped_library(namespace, "FRAGMENT") as lib:

        def define(
            name: str, schema: str, body: Callable[..., Any], fake: Any = torch.empty_like
        ) -> Any:
            lib.define(name + schema)
            lib.impl(name, body, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{name}", fake, lib=lib)
            return getattr(getattr(torch.ops, namespace), name)

        yield define
    for t in translate.registered():
        if t.op.startswith(f"{namespace}::"):
            translate.unregister(t.op)
