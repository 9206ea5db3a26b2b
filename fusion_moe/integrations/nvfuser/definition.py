"""A Fusion as a separate nvFuser FusionDefinition, or written into an existing one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir import Fusion, Value, plain
from . import pointwise, products, rows, shapes
from .library import dtype, nvfuser
from .values import WORDS, Codes
from .writer import Writer

RULES: Mapping[str, Callable[..., Any]] = {
    **pointwise.RULES,
    **shapes.RULES,
    **rows.RULES,
    **products.RULES,
}


@dataclass(frozen=True)
class Argument:
    """An argument of a definition: a size by its symbol, or an input of the Fusion by its number.

    form: for packed codes, WORDS or E2M1 of values.py; transposed: whether the codes are passed as
    [G, K/2, N] and not as [G, N, K/2].
    """

    symbol: str = ""
    input: int = -1
    form: str = ""
    transposed: bool = False


@dataclass(frozen=True)
class Definition:
    """fd: nvFuser's FusionDefinition; arguments: what it is called with, in order."""

    fd: Any
    arguments: tuple[Argument, ...]


def define(fusion: Fusion) -> Definition:
    """The definition of a Fusion whose operations scheduler.py accepts. UnsupportedError if
    nvFuser is not installed.
    """
    arguments: list[Argument] = []
    with nvfuser().FusionDefinition() as fd:
        writer = Writer(fd)
        sizes = {}
        for name in fusion.symbols:
            arguments.append(Argument(symbol=name))
            sizes[name] = fd.define_scalar(dtype=dtype("i64"))
        inputs = [_input(fd, fusion, i, arguments) for i in range(len(fusion.inputs))]
        outputs = write(writer, fusion, inputs, sizes)
        for v, output in zip(fusion.outputs, outputs, strict=True):
            fd.add_output(output if _made_here(v, fusion) else fd.ops.set(output))
    return Definition(fd, tuple(arguments))


def inline(fd: Any, fusion: Fusion, inputs: Sequence[Any]) -> list[Any]:
    """Writes a Fusion without symbols into a definition, and returns its outputs; nothing is
    written twice.

    inputs: tensors of the definition, and `Codes` for packed codes.
    """
    return write(_writer_of(fd), fusion, inputs, {})


def write(w: Writer, fusion: Fusion, inputs: Sequence[Any], sizes: Mapping[str, Any]) -> list[Any]:
    """Writes the operations of a Fusion in order; returns the definition's values for its
    outputs.
    """
    w.fusion, w.sizes = fusion, sizes
    results: dict[Any, Any] = dict(zip(fusion.inputs, inputs, strict=True))
    for op in fusion.ops:
        outputs = RULES[op.kind.name](
            w, op, *(results[v] if isinstance(v, Value) else v for v in op.inputs)
        )
        results.update(zip(op.outputs, outputs if len(op.outputs) > 1 else (outputs,), strict=True))
    return [results[v] for v in fusion.outputs]


def _input(fd: Any, fusion: Fusion, number: int, arguments: list[Argument]) -> Any:
    """The definition's tensor for an input; for packed codes, one for each form that is needed."""
    v = fusion.inputs[number]
    if v.type.dtype != "u8":
        return _tensor(fd, v.type.shape, dtype(v.type.dtype), Argument(input=number), arguments)
    transposed = any(op.attrs.get("transposed") for op in fusion.readers[v])
    g, n, packed_k = (int(v.type.shape[i]) for i in ((0, 2, 1) if transposed else (0, 1, 2)))  # type: ignore[arg-type]
    forms: dict[str, Any] = {}

    def form(name: str) -> Any:
        if name not in forms:
            argument = Argument(input=number, form=name, transposed=transposed)
            if name == WORDS:
                forms[name] = _tensor(fd, (g, n, packed_k // 4), dtype("i32"), argument, arguments)
            else:
                forms[name] = _tensor(
                    fd,
                    (g, packed_k, n),
                    dtype("Float4_e2m1fn_x2"),
                    argument,
                    arguments,
                    stride_order=[2, 0, 1],
                )
        return forms[name]

    return Codes(form)


def _tensor(
    fd: Any,
    shape: Sequence[Any],
    dtype: Any,
    argument: Argument,
    arguments: list[Argument],
    **more: Any,
) -> Any:
    arguments.append(argument)
    sizes = [d if isinstance(d, int) else -1 for d in map(plain, shape)]
    return fd.define_tensor(shape=sizes, contiguity=True if sizes else [], dtype=dtype, **more)


def _made_here(v: Value, fusion: Fusion) -> bool:
    """Whether an output is a new tensor of the definition: inputs, views of them and repeated
    outputs are not.
    """
    if fusion.outputs.index(v) != next(
        i for i, o in enumerate(fusion.outputs) if _root(o, fusion) is _root(v, fusion)
    ):
        return False
    return _root(v, fusion) not in fusion.inputs


def _root(v: Value, fusion: Fusion) -> Value:
    op = fusion.producer(v, "partition")
    return v if op is None else _root(op.values[0], fusion)


def _writer_of(fd: Any) -> Writer:
    """One writer for each definition."""
    if not hasattr(fd, "_fusion_moe_writer"):
        fd._fusion_moe_writer = Writer(fd)
    return fd._fusion_moe_writer
