"""One element of a value as straight-line C++: every operation between memory and the element is
computed where it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from ...encodings import Encoding
from ...encodings.mxfp8 import E4M3
from ...encodings.power_of_two import PowerOfTwo
from ...errors import UnsupportedError
from ...ir import NARROW, Dim, Fusion, Op, Value, plain, types as ir
from ...ir.kinds.eight_bits import TRAINED
from ..inexpressible import Inexpressible, naming
from .indices import ZERO, Call, Index, Number, Variable, bounds, flat, reshaped, size
from .product_plan import base_of, known
from .statements import Case, Choice, Definition, Expression, Statement, formula, written

# in memory
STORED = {
    "f32": "float",
    "bf16": "bf16",
    "f16": "f16",
    "i64": "i64",
    "i32": "i32",
    "u8": "u8",
    "bool": "bool",
}
# in registers
COMPUTED = {
    "f32": "float",
    "bf16": "float",
    "f16": "float",
    "i64": "i64",
    "i32": "i64",
    "u8": "i64",
    "bool": "bool",
}
_FLOATS = ("f32", *NARROW)
_CALLS = {
    "neg": "-{0}",
    "abs": "std::fabs({0})",
    "exp": "exp_({0})",
    "log": "log_({0})",
    "expm1": "expm1_({0})",
    "log1p": "log1p_({0})",
    "sqrt": "std::sqrt({0})",
    "rsqrt": "1.f / std::sqrt({0})",
    "reciprocal": "1.f / {0}",
    "tanh": "tanh_({0})",
    "erf": "erf_({0})",
    "erfc": "std::erfc({0})",
    "sin": "std::sin({0})",
    "cos": "std::cos({0})",
    "atan": "std::atan({0})",
    "floor": "std::floor({0})",
    "round": "std::nearbyint({0})",
    "relu": "relu_({0})",
    "sigmoid": "sigmoid_({0})",
    "silu": "silu_({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "minimum": "minimum_({0}, {1})",
    "maximum": "maximum_({0}, {1})",
    "pow": "pow_({0}, {1})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "logical_and": "{0} && {1}",
    "logical_or": "{0} || {1}",
    "logical_not": "!{0}",
    "where": "{0} ? {1} : {2}",
}
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_ON_INTS = ("neg", "add", "sub", "mul", "minimum", "maximum", "where", *_COMPARED)
# a value in a kernel's registers: indices -> an element
Known = Callable[[Sequence[Index]], Expression]
# a number among the operands is rounded to their dtype first
_AS_TENSORS = ("minimum", "maximum", "where", *_COMPARED)


def array_name(v: Value) -> str:
    """The name of a value's array: the value's own, unless that is a type in the kernels."""
    return f"{v.name}_" if v.name in ("i32", "i64") else v.name


def array(fusion: Fusion, memory: Mapping[Value, str], v: Value) -> str:
    """The name of the array that holds a value, possibly through views and reshapes. memory: the
    names of existing arrays.
    """
    result = v if v in memory else base_of(fusion, v)
    if result not in memory:
        raise UnsupportedError(
            f"{v.name} {v.type} is computed in the same segment that reads it as a whole"
        )
    return memory[result]


class Elements:
    """Writes requested elements, each once. statements: those written so far.

    memory: value -> the name of the array that holds it. known: value -> a function from indices to
    an expression, for values in a kernel's registers. group: ends -> a function from the index of a
    row to the index of its group; other ends are searched. below: variable -> a number that it is
    below, if one is known.
    """

    def __init__(
        self,
        fusion: Fusion,
        memory: Mapping[Value, str],
        known: Mapping[Value, Known] | None = None,
        group: Mapping[Value, Callable[[Index], Index]] | None = None,
        below: Mapping[str, int] | None = None,
    ):
        self.statements: list[Statement] = []
        self._fusion, self._memory, self._known, self._group, self._below = (
            fusion,
            memory,
            known or {},
            group or {},
            below or {},
        )
        self._made: dict[tuple[Value, tuple[Index, ...]], Variable] = {}
        self._names = (f"e{i}" for i in count())

    @property
    def lines(self) -> list[str]:
        """The C++ lines of the statements so far."""
        return written(self.statements)

    def of(self, v: Value, at: Sequence[Index]) -> Variable:
        """A variable with the element of a value at these indices."""
        key = (v, tuple(at))
        if key not in self._made:
            expression = self._expression(v, at)
            self._made[key] = self._define(computed(v), expression)
        return self._made[key]

    def _define(self, type: str, value: Expression) -> Variable:
        name = next(self._names)
        self.statements.append(Definition(type, name, value))
        return Variable(name)

    def kept(self, v: Value, at: Sequence[Index]) -> str:
        """An expression for the element as it is stored in memory, which rounds it: a preceding
        cast to that dtype is left out.
        """
        cast, result = self._fusion.producer(v, "cast"), v
        if (
            cast is not None
            and v not in self._memory
            and {v.type.dtype, cast.values[0].type.dtype} <= {*_FLOATS}
        ):
            result = cast.values[0]
        return f"stored<{stored(v)}>({self.of(result, at)})"

    def row_in_memory(self, v: Value, m: Index, k: int) -> tuple[Value, Index] | None:
        """The value in memory, and its row, that are row m of k columns of value v; None if there
        is no such row.
        """
        op = self._fusion.producer(v)
        if v in self._memory:
            return v, m
        if op is None or not op.values or [*map(plain, op.values[0].type.shape[-1:])] != [k]:
            return None
        if op.kind.name in ("partition", "reshape"):
            return self.row_in_memory(op.values[0], m, k)
        if op.kind.name == "index_select" and op.attrs["dim"] == 0 and len(v.type.shape) == 2:
            return self.row_in_memory(op.values[0], self._picked(op, m), k)
        return None

    def _expression(self, v: Value, at: Sequence[Index]) -> Expression:
        if v in self._known:
            return self._known[v](at)
        if v in self._memory:
            return self._load(v, at)
        op = self._fusion.producer(v)
        if op is None:
            raise UnsupportedError(f"{v.name} {v.type} is not in memory")
        with naming(op):
            return self._call(op, at) if op.kind.name in _CALLS else self._move(op, at)

    def _load(self, v: Value, at: Sequence[Index]) -> Expression:
        if v.type.layout != "linear":
            raise UnsupportedError(
                f"elements of {v.name} {v.type} are not supported in C++",
                expected="the linear layout",
            )
        return formula(
            "widen({}[{}])" if v.type.dtype in _FLOATS else "{}[{}]",
            self._array(v),
            flat(at, v.type.shape),
        )

    def _load_guarded(self, v: Value, at: Sequence[Index]) -> Expression:
        """An element that is read only under a condition."""
        return self._load(v, at)

    # Pointwise ------------------------------------------------------------------------------------

    def _call(self, op: Op, at: Sequence[Index]) -> Expression:
        out = op.outputs[0].type
        floats = [v.type.dtype for v in op.values if v.type.dtype != "bool"]
        like = floats[0] if floats else "bool"
        if like not in (*_FLOATS, "bool") and op.kind.name not in _ON_INTS:
            raise Inexpressible(op, f"{op.kind.name} on {like} has no C++ implementation")
        operands = [
            self.of(v, _broadcast(at, v.type.shape))
            if isinstance(v, Value)
            else _literal(v, like, op)
            for v in op.inputs
        ]
        return _rounded(formula(_CALLS[op.kind.name], *operands), out.dtype, like)

    def _cast(self, op: Op, at: Sequence[Index]) -> Expression:
        (v,), to = op.values, op.attrs["dtype"]
        if v.type.dtype == "f8e4m3" and to in _FLOATS:
            return _rounded(formula("e4m3_({})", self._byte(*self._in_memory(v, at))), to)
        if (
            v.type.dtype not in COMPUTED
            or to not in COMPUTED
            or (v.type.dtype in _FLOATS and to not in (*_FLOATS, "bool"))
        ):
            raise Inexpressible(op, f"a cast from {v.type.dtype} to {to} has no C++ implementation")
        return _rounded(formula(f"{COMPUTED[to]}({{}})", self.of(v, at)), to)

    def _zero_rest(self, op: Op, at: Sequence[Index]) -> Expression:
        x, ends = op.values
        if plain(ends.type.shape[0]) == 0:
            return Expression("0")
        last = size(ends.type.shape[0]) + Number(-1)
        return formula("{} < {}[{}] ? {} : 0", at[0], self._array(ends), last, self.of(x, at))

    def _group_add(self, op: Op, at: Sequence[Index]) -> Expression:
        y = op.values[0]
        _, added = self._of_its_group(op, at)
        return _rounded(formula("{} + {}", self.of(y, at), added), y.type.dtype, y.type.dtype)

    def _group_mul(self, op: Op, at: Sequence[Index]) -> Expression:
        y = op.values[0]
        inside, scale = self._of_its_group(op, at)
        scaled = formula("{0} ? {1} * {2} : {1}", inside, self.of(y, at), scale)
        return _rounded(scaled, y.type.dtype, y.type.dtype)

    def _of_its_group(
        self, op: Op, at: Sequence[Index]
    ) -> tuple[Expression, Expression | Variable]:
        """Whether an element's row is in a group, and that group's element of the table; else 0."""
        _, table, ends = op.values
        groups = size(table.type.shape[0])
        known = self._group.get(base_of(self._fusion, ends))
        result = (
            known(at[0])
            if known
            else Call("group_of", (Variable(self._array(ends)), groups, at[0]))
        )
        group = self._define("i64", formula("{}", result))
        inside = formula("{} < {}", group, groups)
        return inside, self._guarded([(inside, table, [group, at[1]])])

    def _array(self, v: Value) -> str:
        return array(self._fusion, self._memory, v)

    # What moves elements --------------------------------------------------------------------------

    def _move(self, op: Op, at: Sequence[Index]) -> Expression:
        write = getattr(self, f"_{op.kind.name}", None)
        if write is None:
            raise Inexpressible(op, f"{op.kind.name} has no C++ implementation")
        return formula("{}", write(op, at))

    def _partition(self, op: Op, at: Sequence[Index]) -> Variable:
        return self.of(op.values[0], at)

    _ends = _partition

    def _reshape(self, op: Op, at: Sequence[Index]) -> Variable:
        (v,) = op.values
        return self.of(v, reshaped(at, op.outputs[0].type.shape, v.type.shape))

    def _permute(self, op: Op, at: Sequence[Index]) -> Variable:
        dims = op.attrs["dims"]
        return self.of(op.values[0], [at[dims.index(i)] for i in range(len(dims))])

    def _broadcast_in_dim(self, op: Op, at: Sequence[Index]) -> Variable:
        (v,) = op.values
        return self.of(v, _broadcast([at[d] for d in op.attrs["broadcast_dims"]], v.type.shape))

    def _slice(self, op: Op, at: Sequence[Index]) -> Variable:
        return self.of(
            op.values[0], [i + size(s) for i, s in zip(at, op.attrs["start_indices"], strict=True)]
        )

    def _pad(self, op: Op, at: Sequence[Index]) -> Expression | Variable:
        (x,), before = op.values, op.attrs["before"]
        inside = [i + Number(-1) * size(b) for i, b in zip(at, before, strict=True)]
        held = [
            formula("{0} >= 0 && {0} < {1}", i, size(d))
            for i, d in zip(inside, x.type.shape, strict=True)
        ]
        return self._guarded([(formula(" && ".join(["{}"] * len(held)), *held), x, inside)])

    def _cat(self, op: Op, at: Sequence[Index]) -> Expression | Variable:
        dim, start, parts = op.attrs["dim"], ZERO, []
        bounds = self._bounds(at[dim])
        for x in op.values:
            end = start + size(x.type.shape[dim])
            inside = [*at[:dim], at[dim] + Number(-1) * start, *at[dim + 1 :]]
            if bounds and start.evaluate({}) <= bounds[0] and bounds[1] < end.evaluate({}):
                return self.of(x, inside)
            parts.append((self._before(at[dim], end), x, inside))
            start = end
        return self._guarded(parts)

    def _before(self, i: Index, end: Index) -> Expression:
        """Whether an index comes before the end of a part."""
        return formula("{} < {}", i, end)

    def _bounds(self, index: Index) -> tuple[int, int] | None:
        """The least and the largest value that an index can have, if its only variable is known."""
        names = index.reads & self._below.keys()
        return (
            bounds(index, self._below[min(names)]) if len(index.reads) == len(names) == 1 else None
        )

    def _guarded(
        self, parts: Sequence[tuple[Expression, Value, Sequence[Index]]]
    ) -> Expression | Variable:
        """The element of the first value whose condition holds, the only one that is read; zero if
        none does.
        """
        ((condition, v, at), *others) = parts
        if not others and base_of(self._fusion, v) in self._memory and v.type.layout == "linear":
            # No branch: loops over it become vector code.
            return formula("({} ? {} : 0)", condition, self._load_guarded(v, at))
        name, cases = next(self._names), []
        for condition, v, at in parts:
            inside = type(self)(self._fusion, self._memory, self._known, self._group, self._below)
            inside._names = self._names  # names inside must not hide names outside
            result = inside.of(v, at)
            cases.append(Case(condition, tuple(inside.statements), result))
        self.statements.append(Choice(computed(parts[0][1]), name, tuple(cases)))
        return Variable(name)

    def _dequantize(self, op: Op, at: Sequence[Index]) -> Expression:
        """For trained encodings: an e4m3 code times its scale; exact if that is a power of two."""
        packed, *ends = op.values
        pack, encoding = self._fusion.producer(packed, "pack"), packed.type.encoding
        if pack is None or encoding.name not in TRAINED:
            raise Inexpressible(op, f"dequantize of {packed.type} has no C++ implementation")
        if ends:
            codes, scales = pack.values
            code = formula("e4m3_({})", self._byte(codes, at))
            first = self._define(
                "i64",
                formula(
                    f"block_of<{encoding.block}>({{}}, {{}}, {{}})",
                    self._array(ends[0]),
                    size(ends[0].type.shape[0]),
                    at[0],
                ),
            )
            # some are read before it is known which are needed, hence the maximum
            inside = Call("maximum_", (first, Variable("i64(0)")))
            of_rows = self._scale(scales, [inside, at[1]])
            return _rounded(
                formula("{} < 0 ? 0 : {} * {}", first, code, of_rows), op.attrs["dtype"]
            )
        return _rounded(self._pack(pack, at), op.attrs["dtype"])

    def _pack(self, op: Op, at: Sequence[Index]) -> Expression:
        """Of rows whose parts may be gathered: an e4m3 code times the scale of its block."""
        if not holds_rows(op.outputs[0]):
            raise Inexpressible(op, f"{op.outputs[0].type} has no C++ implementation")
        (codes, scales), encoding = op.values, op.outputs[0].type.encoding
        block = Number(encoding.block)
        place = [i // block if d == len(at) + encoding.axis else i for d, i in enumerate(at)]
        of_block = self._scale(scales, place)
        return formula("e4m3_({}) * {}", self._byte(*self._in_memory(codes, at)), of_block)

    def _in_memory(self, v: Value, at: Sequence[Index]) -> tuple[Value, Sequence[Index]]:
        """The value in memory, and the place in it, that an element of a value is."""
        if len(at) != 2 or not isinstance(width := plain(v.type.shape[1]), int):
            return v, at
        row = self.row_in_memory(v, at[0], width)
        return (v, at) if row is None else (row[0], [row[1], at[1]])

    def _scale(self, scales: Value, at: Sequence[Index]) -> Expression | Variable:
        if scales.type.dtype in COMPUTED:
            return self.of(scales, at)
        return formula("e8m0_({})", self._byte(*self._in_memory(scales, at)))

    def _byte(self, v: Value, at: Sequence[Index]) -> Expression:
        return formula("{}[{}]", self._array(v), flat(at, v.type.shape))

    def _full(self, op: Op, at: Sequence[Index]) -> Expression:
        return Expression(_literal(op.attrs["fill_value"], op.attrs["dtype"], op))

    def _index_select(self, op: Op, at: Sequence[Index]) -> Variable:
        dim = op.attrs["dim"]
        return self.of(op.values[0], [*at[:dim], self._picked(op, at[dim]), *at[dim + 1 :]])

    def _routing_map(self, op: Op, at: Sequence[Index]) -> Expression:
        (ids,) = op.values
        slots = [self.of(ids, [at[0], Number(j)]) for j in range(known(ids.type.shape[1]))]
        return formula(
            " || ".join(["{} == {}"] * len(slots)) or "false",
            *(part for slot in slots for part in (slot, at[1])),
        )

    def _picked(self, op: Op, i: Index) -> Index:
        """The element that an index_select picks for index i."""
        return self.of(op.values[1], [i])


def stored(v: Value) -> str:
    """The C++ type of a value's elements in memory."""
    if v.type.dtype in ir.STORED:
        return "u8"
    if v.type.dtype not in STORED:
        raise UnsupportedError(f"{v.type} has no kernel here")
    return STORED[v.type.dtype]


def computed(v: Value) -> str:
    """The C++ type in which a value's elements are computed."""
    if holds_rows(v):
        return "float"
    if v.type.dtype not in COMPUTED:
        raise UnsupportedError(f"{v.type} has no C++ implementation")
    return COMPUTED[v.type.dtype]


def holds_rows(v: Value) -> bool:
    """Whether elements of a value are e4m3 codes, each with a scale of its block."""
    return v.type.quantized and v.type.encoding.element is E4M3 and len(v.type.encoding.parts) == 2


def scale_class(encoding: Encoding) -> str:
    """The C++ class, of both backends, of the rule by which a trained encoding chooses the scale of
    a block.
    """
    (scale,) = encoding.scales
    if not isinstance(scale.choose, PowerOfTwo):
        return "Float32Scale"
    stored = "u8" if scale.dtype == torch.float8_e8m0fnu else "float"
    return f"PowerOfTwo<{stored}, {', '.join(map(str, scale.choose.numbers))}>"


def _broadcast(at: Sequence[Index], shape: Sequence[Dim]) -> list[Index]:
    return [ZERO if plain(d) == 1 else i for i, d in zip(at, shape, strict=True)]


def _rounded(expression: Expression, dtype: str, of: str = "") -> Expression:
    """A number as one of this dtype. of: the dtype of all that it was computed from."""
    if dtype in NARROW:
        again = "_again" if dtype == of else ""
        return formula(f"rounded{again}<{dtype}>({{}})", expression)
    return (
        formula(f"i64({STORED[dtype]}({{}}))", expression) if dtype in ("i32", "u8") else expression
    )


def _literal(value: Any, dtype: str, op: Op) -> str:
    if dtype == "bool":
        return str(bool(value)).lower()
    if dtype == "f64":
        raise Inexpressible(op, f"{op.kind.name} in {dtype} has no C++ implementation")
    if dtype not in _FLOATS:
        return f"i64({int(value)})" if value > -(2**63) else f"(i64({value + 1}) - 1)"
    x = float(value)
    text = (
        "NAN" if math.isnan(x) else ("-INFINITY" if x < 0 else "INFINITY") if math.isinf(x) else ""
    )
    text = f"float({text or repr(x)})"
    return (
        f"({_rounded(Expression(text), dtype)})"
        if op.kind.name in (*_AS_TENSORS, "full")
        else f"({text})"
    )
