"""The ways in which a function that calls our operations is run, which must agree; and which of
them a call runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_moe.frontends.inductor import backend
from fusion_moe.thunder import thunder_executors


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend=backend, fullgraph=True, dynamic=True)


def jitted(f: Callable[..., Any]) -> Callable[..., Any]:
    import thunder

    return thunder.jit(f, executors=thunder_executors())


HOW = {"eager": lambda f: f, "torch.compile": compiled, "thunder.jit": jitted}
every_way = pytest.mark.parametrize(
    "how", [pytest.param(h, marks=pytest.mark.thunder if "thunder" in h else ()) for h in HOW]
)


class Called(TorchDispatchMode):
    """The operations of ours that are run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func.name().partition("::")[2]] if func.namespace == "fusion_moe" else []
        return func(*args, **(kwargs or {}))
