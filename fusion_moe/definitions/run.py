"""`fusion_moe::run` and `fusion_moe::run_into`, which take a program as text: schemas, fakes,
checks and flops. eager.py has the bodies.

run         -> new tensors
run_into    writes each output into a tensor of the caller, once everything is computed: `written`
            has one for each output. read: which of them the program reads, as its last inputs

parts: how many tensors each of the inputs is made of (tensor_lists.py); None: each is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError
from ..ir import Fusion, parse, storage, value
from ..ir.binding import check_stored
from .digest import tagging
from .tensor_lists import PartCounts, grouped

NAMESPACE = "fusion_moe"
# CUDA graphs leave out the first of each
RUN, RUN_INTO = ("run", "run_graph_safe"), ("run_into", "run_into_graph_safe")
# options: None for those in force when the program runs
_TAKES = "(str program, Tensor[] inputs, {}SymInt[] sizes, str? options=None, int[]? parts=None{})"
_INTO = _TAKES.format("Tensor(a!)[] written, ", ", int[]? read=None")
_SCHEMAS = {
    **dict.fromkeys(RUN, _TAKES.format("", "") + " -> Tensor[]"),
    **dict.fromkeys(RUN_INTO, _INTO + " -> ()"),
}


def register(lib: torch.library.Library) -> None:
    """Defines the operations with their fakes and flops."""
    for name, schema in _SCHEMAS.items():
        # Tensors have whatever strides the graph gives them; the program asks for what it needs.
        # Graph-safe ones never run the reference.
        unsafe = (torch.Tag.cudagraph_unsafe,) if name in (RUN[0], RUN_INTO[0]) else ()
        fake, count = (_fake, _flops) if name in RUN else (_into_fake, _into_flops)
        define(lib, name, schema, (torch.Tag.flexible_layout, *unsafe), fake, count)


def define(
    lib: torch.library.Library,
    name: str,
    schema: str,
    tags: Sequence[torch.Tag],
    fake: Callable[..., Any],
    count: Callable[..., int],
) -> None:
    """Defines an operation. count: its floating-point operations, for torch's flop counter."""
    from torch.utils.flop_counter import register_flop_formula

    lib.define(name + schema, tags=tuple(tags))
    torch.library.register_fake(f"{NAMESPACE}::{name}", tagging(fake), lib=lib)
    packet = getattr(torch.ops.fusion_moe, name)
    register_flop_formula(packet, get_raw=True)(count)
    packet.default._op = _of_plain_tensors(packet.default._op)


def _of_plain_tensors(op: Callable[..., Any]) -> Callable[..., Any]:
    """What compiled graphs call, so that no class of their inputs is asked for
    `__torch_function__`: parameters that have one would take torch 3 to 10 us.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return op(*args, **kwargs)

    return call


def empty_outputs(fusion: Fusion, env: Mapping[str, Any], device: torch.device) -> list[Tensor]:
    """New tensors of the shapes and dtypes of the outputs."""
    stored = (storage(v.type, env) for v in fusion.outputs)
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in stored]


def named_sizes(fusion: Fusion, sizes: Sequence[Any]) -> dict[str, Any]:
    """The sizes that a call passes, by name. ShapeError unless there is one for each symbol of its
    program.
    """
    if len(sizes) != len(fusion.symbols):
        raise ShapeError(
            f"{len(sizes)} sizes",
            expected=f"{len(fusion.symbols)}: {', '.join(fusion.symbols)}",
            where="fusion",
        )
    return dict(zip(fusion.symbols, sizes, strict=True))


def flops(fusion: Fusion, env: Mapping[str, Any]) -> int:
    """Floating-point operations of a Fusion's products, two for each multiply-add, as torch's flop
    counter counts other products.
    """
    return sum(
        value(op.kind.flops(op), env)
        for op in fusion.ops
        if op.kind.role == "grouped" and op.kind.flops
    )


def all_inputs(
    fusion: Fusion, inputs: Sequence[Any], written: Sequence[Tensor], read: Sequence[int] | None
) -> list[Any]:
    """All inputs of a program that `run_into` runs. ShapeError."""
    if len(written) != len(fusion.outputs):
        raise ShapeError(
            f"{len(written)} tensors to write",
            expected=f"{len(fusion.outputs)}, one for each output",
            where="run_into",
        )
    whole = [*inputs, *(written[i] for i in read or ())]
    fusion.need_inputs(whole)
    return whole


def need_written(fusion: Fusion, written: Sequence[Tensor], env: Mapping[str, Any]) -> None:
    """ShapeError or DtypeError unless each output fits the tensor into which it is written."""
    for i, (v, t) in enumerate(zip(fusion.outputs, written, strict=True)):
        check_stored(f"the tensor of output {i}", v.type, t, env, "run_into")


def _fake(
    program: str,
    inputs: Sequence[Tensor],
    sizes: Sequence[Any],
    options: str | None = None,
    parts: PartCounts | None = None,
) -> list[Tensor]:
    fusion = parse(program)
    fusion.need_inputs(grouped(inputs, parts))
    return empty_outputs(
        fusion, named_sizes(fusion, sizes), inputs[0].device if inputs else torch.device("cpu")
    )


def _into_fake(
    program: str,
    inputs: Sequence[Tensor],
    written: Sequence[Tensor],
    sizes: Sequence[Any],
    options: str | None = None,
    parts: PartCounts | None = None,
    read: Sequence[int] | None = None,
) -> None:
    fusion = parse(program)
    all_inputs(fusion, grouped(inputs, parts), written, read)
    need_written(fusion, written, named_sizes(fusion, sizes))


def _flops(
    program: str, inputs: Sequence[Tensor], sizes: Sequence[Any], *rest: Any, **about: Any
) -> int:
    fusion = parse(program)
    return flops(fusion, named_sizes(fusion, sizes))


def _into_flops(
    program: str,
    inputs: Sequence[Tensor],
    written: Sequence[Tensor],
    sizes: Sequence[Any],
    *rest: Any,
    **about: Any,
) -> int:
    return _flops(program, inputs, sizes)
