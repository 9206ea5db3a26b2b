"""Gradients of weights that are computed only when asked for: `backward_dw`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..definitions.tensor_lists import Input, flat
from ..errors import UnsupportedError
from ..ir import dtype_name
from . import main_grad


@dataclass
class Waiting:
    """The delayed part of one call's backward, which computes weight gradients. main: whether they
    go to the parameters' main_grad.

    Autograd no longer sees whether its inputs are written in place, so it keeps their versions.
    """

    text: str
    inputs: Sequence[Input]
    env: dict[str, Any]
    options: str
    params: main_grad.Params
    main: bool

    def __post_init__(self) -> None:
        self.versions = [_version(t) for t in flat(self.inputs)[0]]

    def run(self, where: str) -> None:
        """Computes the gradient of each weight that wants one and adds it. UnsupportedError if an
        input was written in place.
        """
        for t, version in zip(flat(self.inputs)[0], self.versions, strict=True):
            if _version(t) != version:
                raise UnsupportedError(
                    f"{dtype_name(t.dtype)}{list(t.shape)} was written in place after the "
                    f"backward: version {_version(t)}, not {version}",
                    expected="inputs and gradients as the backward found them",
                    todo="call backward_dw before their memory is used again",
                    where=where,
                )
        (gradient,) = main_grad.run(
            self.text, self.inputs, self.env, self.options, {0: self.params} if self.main else {}
        )
        if gradient is None:
            for p in self.params:
                if p.requires_grad and hasattr(p, "grad_added_to_main_grad"):
                    p.grad_added_to_main_grad = True
            return
        each = gradient.unbind() if self.params[0].dim() == 2 else (gradient,)
        for p, grad in zip(self.params, each, strict=True):
            if p.requires_grad:
                p.grad = grad.to(p.dtype) if p.grad is None else p.grad.add_(grad)


def _version(t: Tensor) -> int | None:
    """How often a tensor was written in place; None for an inference tensor, which does not
    count.
    """
    return None if t.is_inference() else t._version


@dataclass
class Delayed:
    """A module's waiting backwards, oldest first, and the hooks that are called after each."""

    waiting: deque[Waiting] = field(default_factory=deque)
    hooks: list[Callable[[], Any]] = field(default_factory=list)

    def run(self, where: str) -> None:
        """Runs the oldest backward, frees what it held, calls the hooks. UnsupportedError if there
        is none, or its inputs changed.
        """
        if not self.waiting:
            raise UnsupportedError(
                "backward_dw with nothing to do",
                expected="a backward whose weights' gradients wait",
                todo="call it once for each backward through the module",
                where=where,
            )
        with torch.no_grad():
            self.waiting.popleft().run(where)
        for hook in self.hooks:
            hook()

    def __deepcopy__(self, memo: Any) -> Delayed:
        """A copy of a module has no waiting backwards."""
        return Delayed(hooks=list(self.hooks))

    def __reduce__(self) -> Any:
        return (Delayed, ())
