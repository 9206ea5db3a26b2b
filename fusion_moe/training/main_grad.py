"""Weight gradients that are accumulated in `main_grad` of a parameter, where its owner wants
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..definitions.run import empty_outputs
from ..definitions.tensor_lists import (
    Input,
    are_neighbours,
    flat,
    joined,
)
from ..errors import DeviceError, DtypeError, ShapeError
from ..ir import FLOATS, FusionDefinition, Value, dtype_name, one_line, parse, plain, symbol

Params = Sequence[Tensor]
_DTYPES = (torch.float32, torch.bfloat16)
_WIDE = ("f32", "f64")


def check(params: Params, where: str) -> None:
    """ShapeError, DtypeError or DeviceError unless each parameter that wants a gradient has a
    main_grad that can take it.
    """
    for i, p in enumerate(params):
        if p.requires_grad and not hasattr(p, "get_main_grad"):
            _checked(
                f"weight{i}.main_grad" if len(params) > 1 else "main_grad",
                p,
                getattr(p, "main_grad", None),
                where,
            )


def _checked(name: str, param: Tensor, main: Tensor | None, where: str) -> Tensor:
    if main is None:
        raise ShapeError(
            f"no {name}",
            expected=f"a tensor {list(param.shape)}",
            todo="allocate it before the forward, or leave out accumulate_into_main_grad",
            where=where,
        )
    if main.shape != param.shape:
        raise ShapeError(f"{name} {list(main.shape)}", expected=f"{list(param.shape)}", where=where)
    if main.dtype not in _DTYPES:
        raise DtypeError(
            f"{name} is {main.dtype}", expected=f"{_DTYPES[0]} or {_DTYPES[1]}", where=where
        )
    if main.device != param.device:
        raise DeviceError(f"{name} on {main.device}", expected=str(param.device), where=where)
    return main


def _main(param: Tensor) -> Tensor:
    get = getattr(param, "get_main_grad", None)
    return _checked(
        "main_grad", param, get() if get else getattr(param, "main_grad", None), "backward"
    )


def _overwrites(param: Tensor) -> bool:
    return bool(getattr(param, "overwrite_main_grad", False))


def written(param: Tensor) -> Tensor | None:
    """The gradient that autograd gets for a parameter whose gradient is in main_grad: a tensor
    without meaning if its owner asks to be told, otherwise None.
    """
    if not hasattr(param, "grad_added_to_main_grad"):
        return None
    param.grad_added_to_main_grad = True
    return (
        torch.zeros_like(param)
        if getattr(param, "zero_out_wgrad", False)
        else torch.empty_like(param)
    )


def run(
    text: str,
    inputs: Sequence[Input],
    env: Mapping[str, Any],
    options: str,
    mains: Mapping[int, Params],
) -> list[Tensor | None]:
    """The outputs of a backward. The outputs at positions in `mains` go to the main_grad of these
    parameters, and are returned as None.

    If the main_grads of all groups are wanted and are neighbours in memory, the product writes
    them; otherwise each is copied.
    """
    whole = {place: _whole(params) for place, params in mains.items()}
    ways = tuple(
        (place, dtype_name(t.dtype) if t is not None else "f32", add)
        for place, (t, add) in whole.items()
    )
    program = parse(into(text, ways)) if ways else parse(text)
    sizes = [env[s] for s in program.symbols]
    tensors, parts = flat(inputs)
    if not ways:
        return list(torch.ops.fusion_moe.run(text, tensors, sizes, options, parts))
    targets: list[Tensor] = empty_outputs(program, env, tensors[0].device)
    for place, (t, _) in whole.items():
        targets[place] = targets[place] if t is None else t
    read = sorted(place for place, _, add in ways if add)
    torch.ops.fusion_moe.run_into(into(text, ways), tensors, targets, sizes, options, parts, read)
    for place, (t, _) in whole.items():
        if t is None:
            _one_by_one(mains[place], targets[place])
    return [None if place in mains else t for place, t in enumerate(targets)]


def _whole(params: Params) -> tuple[Tensor | None, bool]:
    """The main_grads as the one tensor that a product writes, or None if they are not one; and
    whether the product adds to it.
    """
    if not all(p.requires_grad for p in params) or len({_overwrites(p) for p in params}) > 1:
        return None, False
    mains = [_main(p) for p in params]
    add = not _overwrites(params[0])
    if len(mains) == 1 and mains[0].dim() == 3:
        return mains[0], add
    alike = len({m.dtype for m in mains}) == 1 and are_neighbours(mains)
    return (joined(mains), add) if alike else (None, False)


def _one_by_one(params: Params, tensor: Tensor) -> None:
    """Writes found f32[G, N, K], or [N, K] for each, into the main_grads of the parameters that
    want a gradient.
    """
    for p, grad in zip(
        params,
        tensor.unbind() if len(params) > 1 or params[0].dim() == 2 else (tensor,),
        strict=True,
    ):
        if p.requires_grad:
            _main(p).copy_(grad) if _overwrites(p) else _main(p).add_(grad)


@lru_cache(maxsize=256)
def into(program: str, ways: tuple[tuple[int, str, bool], ...]) -> str:
    """The program with the outputs at these positions in another dtype; with `add`, added to one
    more input, the tensor into which they are written. These inputs come last.

    They are not rounded in between: sums of a product go from float32 directly to the output's
    dtype.
    """
    fusion, fd = parse(program), FusionDefinition()
    inputs = [fd.define_like(v.type, fusion.role(v)) for v in fusion.inputs]
    outputs = fd.inline(fusion, inputs, {name: symbol(name) for name in fusion.symbols})
    how = {place: (dtype, add) for place, dtype, add in ways}
    for place, v in enumerate(outputs):
        if place not in how:
            fd.add_output(v)
            continue
        (dtype, add), v = how[place], _unrounded(fd, v)
        main = fd.define_like(v.type.with_(dtype=dtype), "state") if add else None
        total = v if main is None else fd.ops.add(fd.ops.cast(main, dtype=v.type.dtype), v)
        fd.add_output(fd.ops.cast(total, dtype=dtype))
    return one_line(fd.fusion())


def _unrounded(fd: FusionDefinition, v: Value) -> Value:
    """The value before its last roundings."""
    op, best = fd.producer(v), v
    while (
        op is not None
        and (op.kind.name == "cast" or _same_shape(op))
        and op.values[0].type.dtype in FLOATS
    ):
        source = op.values[0]
        if source.type.dtype in _WIDE and source.type.shape == v.type.shape:
            best = source
        op = fd.producer(source)
    return best


def _same_shape(op: Any) -> bool:
    return op.kind.name == "reshape" and tuple(map(plain, op.values[0].type.shape)) == tuple(
        map(plain, op.outputs[0].type.shape)
    )
