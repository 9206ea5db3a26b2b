"""Finds the arguments of `scaled_swiglu`, if there are any, with which it is the activation between
a model's two expert products.

They are guessed from the attribute names that transformers' model families use, and confirmed by
comparing numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ... import options

_FEATURES, _ROWS = 8, 256  # of the activation's result; rows that are compared
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


class Swiglu(NamedTuple):
    """Arguments of `scaled_swiglu`."""

    interleave: int
    limit: float | None
    alpha: float
    up_offset: float


# by module, with the numbers that it had
_found = WeakKeyDictionary[Any, tuple[Hashable, Swiglu | None]]()


def swiglu_of(module: Any) -> Swiglu | None:
    """The arguments with which `scaled_swiglu` computes this module's activation; None if it is
    another activation.
    """
    if not module.has_gate:
        return None
    numbers, found = _numbers(module), _found.get(module)
    if found is None or found[0] != numbers:
        _found[module] = found = numbers, _confirmed(module)
    return found[1]


# torch.compiler.assume_constant_result or disable, which would import the tracer. What a module's
# experts compute does not change. Tracers before torch 2.13 take no module as an argument: there
# the graph breaks.
swiglu_of.__dict__[
    "_dynamo_marked_constant" if torch.__version__ >= "2.13" else "_torchdynamo_disable"
] = True


def _numbers(module: Any) -> Hashable:
    """The numbers that an activation may depend on: attributes of the module and of its
    function.
    """
    owners = vars(module), getattr(getattr(module, "act_fn", None), "__dict__", {})
    return tuple(
        (name, v)
        for owner in owners
        for name, v in owner.items()
        if isinstance(v, (bool, int, float)) and name != "training"
    )


def _confirmed(module: Any) -> Swiglu | None:
    # In float32 on the CPU, outside of any tracing and of modes without memory; the reference
    # compiles nothing.
    autocast, reference = torch.autocast("cpu", enabled=False), options.override(target="reference")
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad(), autocast, reference:
        x = _rows()
        try:
            want = module._apply_gate(x)
        except Exception:  # it needs something besides the rows
            return None
        return next(
            (
                how
                for how in _candidates(module)
                if _equal(torch.ops.fusion_moe.scaled_swiglu(x, **how._asdict()), want)
            ),
            None,
        )


def _rows() -> Tensor:
    """f32[_ROWS, 2 * _FEATURES] of magnitudes from 1/100 to 10,000: beyond any limit, and where the
    functions are curved.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shape = _ROWS, 2 * _FEATURES
    signs = torch.randint(0, 2, shape, generator=generator, device="cpu") * 2.0 - 1.0
    return signs * 10.0 ** (
        6 * torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32) - 2
    )


def _candidates(module: Any) -> Iterator[Swiglu]:
    """Possible arguments of `scaled_swiglu`, from the attributes of a module."""
    interleave = 0 if module.is_concatenated else 1
    limits, alphas = [None, *_attributes(module, _LIMITS)], [1.0, *_attributes(module, _ALPHAS)]
    return (Swiglu(interleave, *rest) for rest in product(limits, alphas, (0.0, 1.0)))


def _attributes(module: Any, names: tuple[str, ...]) -> list[float]:
    return list(
        dict.fromkeys(
            float(v) for name in names if isinstance(v := getattr(module, name, None), (int, float))
        )
    )


def _equal(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-6)
