"""The ways in which a function that calls our operations is run: they must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
