"""The data of the IR: a Fusion is a list of operations over typed values, and can be verified,
evaluated and printed at every stage.

`Fusion.evaluate`, in plain torch, defines the meaning: every pass preserves it, and every kernel is
tested against it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from ..encodings import Encoding, find
from ..errors import Error, FusionError, ShapeError, did_you_mean
from ..layouts import check_ends
from .binding import check_stored, elements_of, resolve, solve
from .signature import Signature, signature
from .sizes import AnySize, never_negative, value
from .types import MOST_ELEMENTS, Groups, Rows, TensorType, checked_type, elements, sizes_in

MOST_ROWS = 2**31 - 1  # the most that the int32 ends of a partition can express
# an input is new at each call, the same at each call, or changed by each call
ROLES = ("argument", "weight", "state")


# names of torch, by the operation that does the same
_TORCHS = {
    "cast": "to float half double bfloat16 int long bool",
    "reshape": "view flatten",
    "permute": "t T mT transpose",
    "slice": "narrow chunk split",
}
# names of torch that are several operations
_MADE_OF = {
    "clamp": "fd.ops.minimum and fd.ops.maximum",
    "clip": "fd.ops.minimum and fd.ops.maximum",
    "exp2": "fd.ops.exp(x * 0.6931471805599453)",
    "gelu": "fd.ops.erf, or fd.ops.tanh",
    "leaky_relu": "fd.ops.where",
    "mean": "fd.ops.sum, and a product",
    "softmax": "fd.ops.logsumexp, and fd.ops.exp of what is left",
    "softplus": "fd.ops.log1p(fd.ops.exp(x))",
    "square": "x * x",
}


class NoOperationError(FusionError, AttributeError):
    """An attribute that `fd.ops` or a value does not have."""


def no_operation(found: str, name: str, kinds: Iterable[str]) -> NoOperationError:
    """The error for a name that is not one of fd.ops, or not found there."""
    like = [kind for kind, names in _TORCHS.items() if name in names.split()]
    for kind in (*(k for k in kinds if k == name), *like):
        return NoOperationError(found, expected=f"fd.ops.{kind}")
    if name in _MADE_OF:
        return NoOperationError(found, expected=_MADE_OF[name])
    return NoOperationError(found, expected="one of dir(fd.ops)", todo=did_you_mean(name, kinds))


def _operator(kind: str, *, swapped: bool = False) -> Callable[..., Value]:
    def method(self: Value, *other: Operand) -> Value:
        if self.ops is None:
            raise FusionError(
                f"an operator on {self.name}, {self.type}, which no FusionDefinition made",
                expected=f"fd.ops.{kind}",
            )
        operation: Callable[..., Value] = getattr(self.ops, kind)
        return operation(*other, self) if swapped else operation(self, *other)

    return method


@dataclass(frozen=True, eq=False)
class Value:
    """One result or input, assigned once.

    Python's operators are those of `fd.ops`: `a * b` is `fd.ops.mul(a, b)`, `a < b` is
    `fd.ops.lt(a, b)`, `~mask` is `fd.ops.logical_not(mask)`. But `==` says whether two values are
    one and the same; `fd.ops.eq` compares their elements.
    """

    name: str
    type: TensorType
    ops: Any = field(default=None, repr=False)  # of the FusionDefinition that made it

    __array_ufunc__ = None  # so that numpy's numbers leave operators to this class
    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swapped=True)
    __pow__ = _operator("pow")
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    __and__, __or__ = _operator("logical_and"), _operator("logical_or")
    __neg__, __abs__, __invert__ = map(_operator, ("neg", "abs", "logical_not"))

    if not TYPE_CHECKING:  # to type checkers all attributes would exist

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            actual = f"{name!r} of the value {self.name}, {self.type}"
            if name in ("shape", "dtype"):
                raise NoOperationError(actual, expected=f"{self.name}.type.{name}")
            raise no_operation(actual, name, dir(self.ops))

    def __getitem__(self, index: Any) -> NoReturn:
        raise FusionError(
            f"an index of {self.name}, {self.type}",
            expected="fd.ops.slice, or fd.ops.index_select for rows by number",
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, MethodDescriptorType):
            return NotImplemented  # a tensor's operator: Value's is tried next
        value = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Value))
        name = getattr(func, "__name__", str(func))
        raise no_operation(f"torch's {name} of {value.name}, {value.type}", name, dir(value.ops))

    def __bool__(self) -> bool:
        """True, as for any object; FusionError for a mask, whose elements only a call knows."""
        if self.type.dtype == "bool":
            raise FusionError(
                f"a decision by the mask {self.name}, {self.type}",
                expected="a choice for each element",
                todo="fd.ops.where(mask, a, b) chooses, & and | join masks",
            )
        return True


Operand = Value | int | float | bool  # a number takes the dtype of the other tensors
Need = tuple[AnySize, str]  # a size that must not be negative, and a sentence about it


@dataclass(frozen=True)
class OpKind:
    """One row of the table of operations: everything on which all stages must agree.

    infer(*types, **attrs) -> the types of the outputs; evaluate(*tensors, **attrs) -> the outputs,
    in plain torch. The annotations of infer say which arguments are operands, and the type of each
    attribute (signature.py). needs(*types, **attrs) -> sizes that must not be negative, with a
    description of each: those that depend on symbols are checked when a Fusion is bound to tensors.
    grad(fd, op, *output_grads) -> one gradient (or None) for each input, written with fd.ops; a
    gradient is None for an output that has none; None: no derivative. flops(op) -> floating-point
    operations as a size; outputs: how many there are; view: does no work of its own and is copied
    into every kernel that reads it. moves_rows_in: the bytes of the pieces in which it moves rows,
    0 if it moves none: its first operand may also be codes, with scales after all other operands,
    and after all other results.

    What an operation with kernels of its own brings: scheduler, for pieces with it
    (`schedule.Scheduler`); sources: by backend, f(piece) -> what the backend emits from;
    handle(op, fusion) -> what an input stands for (runtime/handles.py).
    """

    name: str
    infer: Callable[..., tuple[TensorType, ...]]
    evaluate: Callable[..., tuple[Any, ...]]
    grad: Callable[..., Sequence[Value | None]] | None = None
    needs: Callable[..., Iterable[Need]] | None = None
    flops: Callable[[Op], Any] | None = None
    view: bool = False
    outputs: int | None = 1  # None: as many as an encoding has parts
    # what schedulers look at: pointwise | shape | view | gather | routing | grouped | reduce |
    # quantize | layout | collective (which all ranks of a group run)
    role: str = "pointwise"
    moves_rows_in: int = 0
    scheduler: Any = None
    sources: Mapping[str, Callable[[Fusion], Any]] = field(default_factory=dict, compare=False)
    handle: Callable[[Op, Fusion], Any] | None = None

    @property
    def signature(self) -> Signature:
        """The operands and attributes of the operation."""
        return signature(self.infer)

    @cached_property
    def doc(self) -> str:
        """What the operation computes: the docstring of its type rule."""
        return inspect.getdoc(self.infer) or ""


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. source: the line of the user's program that it comes from; translator: the
    line that made it.
    """

    kind: OpKind
    inputs: tuple[Operand, ...]
    attrs: Mapping[str, Any]
    outputs: tuple[Value, ...]
    source: str = ""
    translator: str = ""

    @property
    def values(self) -> tuple[Value, ...]:
        """The inputs that are values, without numbers."""
        return tuple(v for v in self.inputs if isinstance(v, Value))

    def types(self) -> Iterator[TensorType | int | float | bool]:
        """The arguments of the type rule: the types of the inputs, and numbers as they are."""
        for v in self.inputs:
            yield v.type if isinstance(v, Value) else v

    @property
    def encoding(self) -> Encoding:
        """The encoding that its attributes name."""
        return find(self.attrs["encoding"])

    @property
    def rule(self) -> str:
        """The rule for scales of blocks by which it quantizes (encodings/search.py)."""
        return str(self.attrs.get("scales", "max"))

    def with_inputs(self, inputs: Sequence[Operand]) -> Op:
        """This operation with other inputs of the same types."""
        return replace(self, inputs=tuple(inputs))


def of_kind(op: Op | None, kinds: Collection[str]) -> Op | None:
    """The operation, if it is of one of these kinds; of any, if there are none."""
    return op if op is not None and (not kinds or op.kind.name in kinds) else None


def infer(kind: OpKind, types: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    """The types of an operation's outputs, by its type rule. ShapeError, DtypeError or
    FusionError for inputs and attributes that do not fit.
    """
    try:
        types_out = kind.infer(*types, **kind.signature.check(attrs))
        assert kind.outputs in (None, len(types_out)), kind.name
        for size, why in _needs(kind, types, attrs):
            if never_negative(size) is False:
                raise ShapeError(why)
        return tuple(map(checked_type, types_out))
    except Error:
        raise
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise FusionError(
            f"arguments that it does not accept: {error}",
            todo="fusion_moe/ir/kinds has its signature",
        ) from None


def _needs(kind: OpKind, types: Sequence[Any], attrs: Mapping[str, Any]) -> Iterator[Need]:
    if kind.needs is not None:
        yield from kind.needs(*types, **attrs)
    for attr in attrs.values():
        for size in sizes_in(attr):
            yield from ((of, f"{of} in {size} is negative") for of in size.ceilings())


class Partitions:
    """The number of rows of each partition. All statements of a program agree, so ends checked for
    one value are valid for all others.
    """

    def __init__(self) -> None:
        self._rows: dict[Groups, AnySize] = {}

    def rows(self, groups: Groups | None) -> AnySize | None:
        """The rows of a partition, if any value has it."""
        return None if groups is None else self._rows.get(groups)

    def add(
        self, types: Iterable[TensorType], attrs: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Adds values, and the attributes of the operation that made them. FusionError if a
        partition had another number of rows before.
        """
        for t in types:
            stated = [(d.groups, d.total) for d in t.shape if isinstance(d, Rows)]
            stated += [(t.ends, attrs["rows"])] if t.ends is not None and "rows" in attrs else []
            for groups, rows in stated:
                if (before := self._rows.setdefault(groups, rows)) != rows:
                    raise FusionError(
                        f"{rows} rows partitioned by {groups}, which partitions {before} rows",
                        expected="one number of rows for each partition",
                        todo="make ends for the other number of rows with fd.ops.ends(offs, "
                        "rows=..., groups=...)",
                    )


@dataclass(frozen=True)
class Fusion:
    """A program: inputs, operations in order, outputs.

    roles: input -> "argument" | "weight" | "state"; "argument" if missing.
    """

    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    roles: Mapping[Value, str] = field(default_factory=dict)

    def verify(self) -> Fusion:
        """This Fusion; FusionError unless values are made before they are read, types follow their
        rules, and partitions are made once.
        """
        _ = self._verified
        return self

    @cached_property
    def _verified(self) -> bool:
        """True, found once: passes verify what they make, and what runs them does again."""
        seen, rows = set(self.inputs), Partitions()
        partitions = [v.type.ends.name for v in self.inputs if v.type.ends]
        rows.add(v.type for v in self.inputs)
        if len(seen) < len(self.inputs) or len(set(partitions)) < len(partitions):
            raise FusionError(
                f"inputs {_types([v.type for v in self.inputs])}",
                expected="each input, and the ends of each partition, once",
            )
        for i, op in enumerate(self.ops):
            if missing := [v.name for v in op.values if v not in seen]:
                raise self._error(
                    i,
                    f"reads {', '.join(missing)} before it is computed",
                    "inputs, and results of operations before",
                )
            try:
                want = infer(op.kind, tuple(op.types()), op.attrs)
                rows.add(want, op.attrs)
            except Error as error:
                raise self._error(i, error.found, error.expected) from None
            if (got := tuple(v.type for v in op.outputs)) != want:
                raise self._error(
                    i, f"is typed {_types(got)}", f"{_types(want)}, as its rule gives"
                )
            for partition in (v.type.ends.name for v in op.outputs if v.type.ends):
                if partition in partitions:
                    raise self._error(
                        i, f"defines the partition {partition} twice", "one name for each partition"
                    )
                partitions.append(partition)
            if again := [v.name for v in op.outputs if v in seen]:
                raise self._error(
                    i, f"computes {', '.join(again)} twice", "a new value for each result"
                )
            seen.update(op.outputs)
        if missing := [v.name for v in self.outputs if v not in seen]:
            raise FusionError(
                f"output {', '.join(missing)} is never computed",
                todo="add the operation that computes it",
            )
        return True

    def _error(self, at: int, why: str, expected: str = "") -> FusionError:
        # text imports this module; only messages need it here
        from .text import op_text, value_names

        names, op = value_names(self), self.ops[at]
        near = "\n".join(
            ("-> " if i == at else "   ") + op_text(o, names)
            for i, o in enumerate(self.ops)
            if abs(i - at) < 4
        )
        return FusionError(
            why,
            expected=expected,
            todo=f"made by {op.translator or 'hand'}\n{near}",
            where=op.kind.name,
        )

    @property
    def values(self) -> tuple[Value, ...]:
        """All inputs and results, in order."""
        return (*self.inputs, *(v for op in self.ops for v in op.outputs))

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes that become known only at launch, in order of first use."""
        names = [s for v in self.inputs for s in v.type.symbols()]
        for op in self.ops:
            names += [s for size in sizes_in(tuple(op.attrs.values())) for s in size.symbols()]
            names += [s for v in op.outputs for s in v.type.symbols()]
        return tuple(dict.fromkeys(names))

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """Conditions that depend on the symbols' values: sizes that must not be negative, with
        sentences about them.
        """
        needs = [need for op in self.ops for need in _needs(op.kind, tuple(op.types()), op.attrs)]
        for v in self.values:
            for size in sizes_in(v.type.shape):
                needs += [
                    (s, f"{s} in the shape {v.type} is negative") for s in (size, *size.ceilings())
                ]
            needs += [
                (
                    MOST_ROWS - d.total,
                    f"{d.total} rows are partitioned by {d.groups}, whose ends have 32 bits",
                )
                for d in v.type.shape
                if isinstance(d, Rows)
            ]
            count = elements(v.type.shape)
            needs.append(
                (MOST_ELEMENTS - count, f"{count} elements are more than 63 bits can count")
            )
        return tuple(dict.fromkeys(need for need in needs if not never_negative(need[0])))

    @cached_property
    def ends(self) -> Mapping[Groups, Value]:
        """For each partition, the value that holds its ends."""
        return {v.type.ends: v for v in self.values if v.type.ends}

    @cached_property
    def partitions(self) -> Partitions:
        """The number of rows of each partition."""
        partitions = Partitions()
        partitions.add(v.type for v in self.inputs)
        for op in self.ops:
            partitions.add((v.type for v in op.outputs), op.attrs)
        return partitions

    @cached_property
    def producers(self) -> Mapping[Value, Op]:
        """The operation that makes each value (inputs have none)."""
        return {v: op for op in self.ops for v in op.outputs}

    def producer(self, value: Any, *kinds: str) -> Op | None:
        """The operation that makes a value; None for an input or a number, and for an operation of
        another kind, if kinds are given.
        """
        return of_kind(self.producers.get(value), kinds)

    @cached_property
    def readers(self) -> Mapping[Value, tuple[Op, ...]]:
        """The operations that read each value, in order."""
        readers: dict[Value, list[Op]] = {}
        for op in self.ops:
            for v in dict.fromkeys(op.values):
                readers.setdefault(v, []).append(op)
        return {v: tuple(ops) for v, ops in readers.items()}

    def only_reader(self, value: Value, kind: str) -> Op | None:
        """The operation that reads a value, if it is of this kind, and nothing else reads it: it is
        no output either.
        """
        readers = self.readers.get(value, ())
        alone = len(readers) == 1 and value not in self.outputs
        return of_kind(readers[0], (kind,)) if alone else None

    def role(self, value: Value) -> str:
        """One of "argument", "weight" and "state"."""
        return self.roles.get(value, "argument")

    def need_inputs(self, tensors: Sequence[Any]) -> None:
        """ShapeError unless there is one tensor for each input."""
        if len(tensors) != len(self.inputs):
            raise ShapeError(
                f"{len(tensors)} inputs", expected=str(len(self.inputs)), where="fusion"
            )

    def bind(
        self, tensors: Sequence[Any], sizes: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """The values of the symbols, from the shapes of the inputs; raises, before anything is
        read, if these do not fit the types.
        """
        self.need_inputs(tensors)
        env: dict[str, int] = dict(sizes or {})
        for v, tensor in zip(self.inputs, tensors, strict=True):
            solve(v.type, elements_of(tensor), env)
        if missing := [s for s in self.symbols if s not in env]:
            raise ShapeError(
                f"no input has the size {', '.join(missing)}",
                todo="pass it in sizes",
                where="fusion",
            )
        if wrong := [f"{name} = {n}" for name, n in env.items() if not 0 <= n <= MOST_ELEMENTS]:
            raise ShapeError(
                ", ".join(wrong), expected="sizes of 0 or more, of 63 bits", where="fusion"
            )
        for v, tensor in zip(self.inputs, tensors, strict=True):
            check_stored(v.name, v.type, elements_of(tensor), env, "fusion")
        for size, why in self.needs:
            if value(size, env) < 0:
                bound = ", ".join(
                    f"{name} = {n}" for name, n in env.items() if name in re.findall(r"\w+", why)
                )
                raise ShapeError(
                    f"{why}: {bound}" if bound else why,
                    expected="sizes that the program was written for",
                    where="fusion",
                )
        return env

    def evaluate(
        self,
        *tensors: Any,
        sizes: Mapping[str, int] | None = None,
        using: Mapping[Op, Callable[..., tuple[Any, ...]]] | None = None,
    ) -> tuple[Any, ...]:
        """The outputs for these inputs, in plain torch: the meaning of the program. Checks ends and
        ids on the host.

        using: replacements for operations, called like the `evaluate` of their kinds.
        """
        env = self.bind(tensors, sizes)
        values: dict[Any, Any] = dict(zip(self.inputs, tensors, strict=True))
        for v, tensor in values.items():
            if v.type.ends:
                rows = self.partitions.rows(v.type.ends)
                most, apart = MOST_ROWS if rows is None else value(rows, env), v.type.ends.stride
                check_ends(tensor, most, v.name, apart if apart is None else value(apart, env))
        device = elements_of(tensors[0]).device if tensors else torch.device("cpu")
        # for operations that create tensors without inputs
        with torch.device(device) if device.type != "cpu" else nullcontext():
            self._run(values, env, using or {})
        return tuple(values[v] for v in self.outputs)

    def _run(
        self,
        made: dict[Any, Any],
        env: Mapping[str, int],
        using: Mapping[Op, Callable[..., tuple[Any, ...]]],
    ) -> None:
        last = {v: op for op in self.ops for v in op.values}
        for op in self.ops:
            args = [made[v] if isinstance(v, Value) else v for v in op.inputs]
            run = using.get(op, op.kind.evaluate)
            made.update(zip(op.outputs, run(*args, **resolve(op.attrs, env)), strict=True))
            for v in op.values:  # as kernels do: frees values that are not read any more
                if last[v] is op and v not in self.outputs:
                    made.pop(v, None)

    def __str__(self) -> str:
        from .text import text  # text imports this module

        return text(self)


def _types(types: Sequence[TensorType]) -> str:
    return ", ".join(map(str, types))
