"""FusionDefinition: builds a Fusion call by call, with the names of nvFuser's Python frontend.

fd = FusionDefinition()
x = fd.define_tensor(shape=[-1, 64], dtype="bf16")
y = fd.ops.silu(x)
fd.add_output(y)
print(fd.fusion())
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import Error, FusionError
from .core import ROLES, Fusion, Op, OpKind, Partitions, Value, infer, of_kind
from .kinds.rules import need_rank
from .op_methods import Ops
from .signature import checked_operand
from .sizes import AnySize, Size, is_size, never_negative, symbol, value
from .types import Dim, Groups, Rows, TensorType, checked_type, dtype_name, plain

_HERE = str(Path(__file__).parent)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")  # names that kernels can contain
_TAKEN = re.compile(r"[it]\d+|fd|ceildiv|inf|nan")


class FusionDefinition:
    """Builds a program of the IR: inputs, operations, outputs; `fusion()` verifies and returns it.

        fd = fusion_moe.FusionDefinition()
        x = fd.define_tensor(shape=[-1, 64], dtype="bf16")
        fd.add_output(fd.ops.silu(x))
        (y,) = fusion_moe.run(fd.fusion(), [torch.randn(8, 64).bfloat16()])

    `fd.ops` has one method for each operation.

    Args:
        places: whether errors say which operation they are about. Without, the caller does.
        by_columns: for 8-bit training: whether derivatives store codes along rows by columns.
    """

    def __init__(self, *, places: bool = True, by_columns: bool = False) -> None:
        self.by_columns = by_columns
        self.ops = Ops(self.append)
        self._places = places
        self._source = ""  # the line of the user's program that the next operations come from
        self._translator = ""  # the line of the translator that makes them; "": the caller's line
        self._inputs: list[Value] = []
        self._ops: list[Op] = []
        self._outputs: list[Value] = []
        self._roles: dict[Value, str] = {}
        self._names: set[str] = set()
        self._views: dict[Any, tuple[Value, ...]] = {}
        self._producers: dict[Value, Op] = {}
        self._partitions = Partitions()
        self._only_ops = False

    def define_size(self, name: str) -> Size:
        """A size that becomes known only at launch."""
        self._check_may("define_size")
        return symbol(self._new_name(name))

    def define_groups(self, name: str, count: AnySize, stride: AnySize | None = None) -> Groups:
        """A partition of rows into `count` groups, for `ends` and `route`, and for tensors with
        partitioned rows: shape=[m / g, 64]. stride: as of `Groups`, for `dispatch`.
        """
        if (
            isinstance(count, bool)
            or not isinstance(count, (int, Size))
            or never_negative(count) is False
        ):
            raise FusionError(f"{count!r} groups", expected="a number of groups, 0 or more")
        if stride is not None and (not is_size(stride) or never_negative(stride) is False):
            raise FusionError(f"a stride of {stride!r}", expected="a number of rows, 0 or more")
        return Groups(self._new_name(name), count, stride)

    def define_tensor(
        self,
        *,
        shape: Sequence[Dim],
        dtype: str | torch.dtype,
        layout: str = "linear",
        ends: Groups | None = None,
        role: str = "argument",
    ) -> Value:
        """Declares an input of a shape and a dtype.

        Args:
            shape: its sizes. A size of -1 becomes known only at launch.
            dtype: "bf16", "f32", ... or a dtype of torch.
            layout: the order of its elements in memory.
            ends: the partition whose ends its elements are.
            role: "argument", "weight" or "state".
        """
        dims = tuple(
            self.define_size(self._fresh("s")) if isinstance(d, int) and d == -1 else d
            for d in shape
        )
        return self.define_like(
            TensorType(dims, dtype if isinstance(dtype, str) else dtype_name(dtype), layout, ends),
            role,
        )

    def define_like(self, type: TensorType, role: str = "argument") -> Value:
        """Declares an input of a given type."""
        self._check_may("define_tensor")
        value = Value(f"i{len(self._inputs)}", checked_type(type), self.ops)
        if role not in ROLES:
            raise FusionError(f"role {role!r}", expected=f"one of {', '.join(ROLES)}")
        self._add_partitions([type], {})
        self._inputs.append(value)
        self._roles[value] = role
        return value

    def from_pytorch(self, tensor: torch.Tensor) -> Value:
        """An input with the shape and dtype of a tensor."""
        return self.define_tensor(shape=tuple(tensor.shape), dtype=tensor.dtype)

    def add_output(self, value: Value) -> None:
        """Declares a value that is returned as an output."""
        self._check_may("add_output")
        if not isinstance(value, Value):
            raise FusionError(
                f"the output {value!r}",
                expected="a value of this Fusion",
                todo="create constants with fd.ops.full",
            )
        self._outputs.append(value)

    def mark_weight(self, *values: Value | None) -> None:
        """Declares that those values which are inputs are weights: they stay the same from call to
        call.
        """
        self._roles.update((v, "weight") for v in values if v in self._roles)

    def fusion(self) -> Fusion:
        """The verified Fusion of everything built so far."""
        return Fusion(
            tuple(self._inputs), tuple(self._ops), tuple(self._outputs), self._roles
        ).verify()

    def fresh_groups(self, count: AnySize, stride: AnySize | None = None) -> Groups:
        """A partition into `count` groups, as `define_groups` makes it, under a name that the
        definition does not have yet.
        """
        return self.define_groups(self._fresh("g"), count, stride)

    def inline(
        self, fusion: Fusion, inputs: Sequence[Value], sizes: Mapping[str, AnySize]
    ) -> tuple[Value, ...]:
        """Copies the operations of a Fusion onto other inputs and sizes.

        If its partitions by ends already partition rows here, they become these partitions; rows
        partitioned by other ends count as plain rows.

        Args:
            fusion: the Fusion, which stays as it is.
            inputs: a value of this one for each input of the Fusion.
            sizes: what the symbols of the Fusion are here.

        Returns:
            The copies of its outputs.
        """
        copies: dict[Any, Any] = dict(zip(fusion.inputs, inputs, strict=True))
        groups: dict[Groups, Groups] = {}
        for op in fusion.ops:
            if op.kind.name == "ends":
                rows, stride = op.attrs["rows"], op.attrs["groups"].stride
                copies[op.outputs[0]] = ends = self.groups_of(
                    copies[op.values[0]],
                    value(rows, sizes),
                    None if stride is None else value(stride, sizes),
                )
                assert ends.type.ends is not None
                groups[op.attrs["groups"]] = ends.type.ends
                continue
            if op.kind.name == "partition":
                copies[op.outputs[0]] = self.partition_by(*(copies[v] for v in op.values))
                continue
            for made_here in (v.type.ends for v in op.outputs if v.type.ends):
                stride = None if made_here.stride is None else value(made_here.stride, sizes)
                groups[made_here] = self.fresh_groups(value(made_here.count, sizes), stride)
            attrs = {name: _moved(attr, sizes, groups) for name, attr in op.attrs.items()}
            outputs = self.append(
                op.kind, [copies[v] if isinstance(v, Value) else v for v in op.inputs], attrs
            )
            copies.update(zip(op.outputs, outputs, strict=True))
        return tuple(copies[v] for v in fusion.outputs)

    @contextmanager
    def at(self, source: str, translator: str = "") -> Iterator[None]:
        """Attributes operations made inside to this line of the user's program (and to this line of
        a translator).
        """
        before = self._source, self._translator
        self._source, self._translator = source, translator
        try:
            yield
        finally:
            self._source, self._translator = before

    @contextmanager
    def only_ops(self) -> Iterator[None]:
        """Inside, only operations and partitions can be made; declaring an input, an output or a
        size is a FusionError.
        """
        before, self._only_ops = self._only_ops, True
        try:
            yield
        finally:
            self._only_ops = before

    def append(
        self, kind: OpKind, inputs: Sequence[Any], attrs: Mapping[str, Any]
    ) -> tuple[Value, ...]:
        """Adds one operation; its output types come from its kind's type rule. Equal views are made
        only once.
        """
        try:
            operands, attrs = kind.signature.bind(inputs, attrs)
            inputs = tuple(
                self._own(v) if isinstance(v, Value) else checked_operand(v) for v in operands
            )
            key = (kind.name, inputs, tuple(attrs.items())) if kind.view else None
            if key in self._views:
                return self._views[key]
            types = infer(kind, [v.type if isinstance(v, Value) else v for v in inputs], attrs)
            self._add_partitions(types, attrs)
        except Error as error:
            raise (error.at(kind.name) if self._places else error) from None
        first = len(self._producers)
        outputs = tuple(Value(f"t{first + i}", t, self.ops) for i, t in enumerate(types))
        op = Op(kind, inputs, attrs, outputs, self._source, self._translator or _caller())
        self._ops.append(op)
        self._producers.update(dict.fromkeys(outputs, op))
        if key is not None:
            self._views[key] = outputs
        return outputs

    def copy(self, op: Op, copies: dict[Any, Any]) -> tuple[Value, ...]:
        """Adds a copy of an operation of another Fusion, on the copies of its operands, and its
        results to `copies`.
        """
        with self.at(op.source, op.translator):
            outputs = self.append(op.kind, [copies.get(v, v) for v in op.inputs], op.attrs)
        copies.update(zip(op.outputs, outputs, strict=True))
        return outputs

    def _own(self, value: Value) -> Value:
        if not self.has(value):
            raise FusionError(
                f"the operand {value.name}, {value.type}, of another FusionDefinition",
                expected="a value of this one",
            )
        return value

    def _check_may(self, what: str) -> None:
        if self._only_ops:
            raise FusionError(
                f"fd.{what} in a translator",
                expected="operations on its arguments",
                todo="return the results",
            )

    def groups_of(self, offs: Value, rows: Dim, stride: AnySize | None = None) -> Value:
        """The ends-typed value for a vector of group ends and this many rows; equal calls return
        the same value and the same partition.

        Args:
            offs: i32[G], or the ends of another partition. If that has as many rows, its ends are
                returned; otherwise they are checked anew.
            rows: the number of rows that are partitioned, or the first size of a tensor of them.
            stride: as of `Groups`.
        """
        rows, known = plain(rows), offs.type.ends
        fits = known is not None and stride in (None, known.stride)
        if fits and self._partitions.rows(known) in (None, rows):
            return offs

        def make(groups: Groups) -> Value:
            vector = offs if offs.type.ends is None else self.ops.cast(offs, dtype="i32")
            return self.ops.ends(vector, rows=rows, groups=groups)

        return self._cut_once(("groups_of", offs, rows, stride), make, offs, stride)

    def partition_by(self, x: Value, ends: Value) -> Value:
        """x [M, ...] -> [M/g, ...]; rows that are partitioned by other ends count as plain rows:
        the call decides which ends count.
        """
        dim = x.type.shape[0]
        if isinstance(dim, Rows) and dim.groups != ends.type.ends:
            x = self.ops.reshape(x, new_shape=(dim.total, *x.type.shape[1:]))
        return self.ops.partition(x, ends)

    def groups_of_problem(
        self,
        starts: Value,
        problem_sizes: Value,
        padded_starts: Value,
        rows: AnySize,
        n: int,
        k: int,
    ) -> Value:
        """The ends-typed value of a partition in nvFuser's form (`problem_ends`); equal calls
        return the same value.
        """
        inputs = (starts, problem_sizes, padded_starts)
        key = ("groups_of_problem", inputs, rows, n, k)
        return self._cut_once(
            key,
            lambda groups: self.ops.problem_ends(*inputs, rows=rows, groups=groups, n=n, k=k),
            starts,
        )

    def _cut_once(
        self, key: Any, make: Callable[[Groups], Value], each: Value, stride: AnySize | None = None
    ) -> Value:
        """The result of `make` for this key, on a new partition with a group for each element of
        `each`; made once.
        """
        if key not in self._views:
            need_rank("offs", each.type, 1)
            self._views[key] = (make(self.fresh_groups(plain(each.type.shape[0]), stride)),)
        return self._views[key][0]

    @property
    def count(self) -> int:
        """The number of operations so far."""
        return len(self._ops)

    def ops_from(self, first: int) -> tuple[Op, ...]:
        """The operations appended after the first `first` ones."""
        return tuple(self._ops[first:])

    def has(self, value: Value) -> bool:
        """Whether a value is an input or a result here."""
        return value in self._roles or value in self._producers

    def producer(self, value: Any, *kinds: str) -> Op | None:
        """The operation that made a value; None for an input or a number, and for an operation of
        another kind, if kinds are given.
        """
        return of_kind(self._producers.get(value), kinds)

    def made_by(self, value: Value) -> str:
        """The kind of the operation that made a value; "" for an input."""
        op = self.producer(value)
        return op.kind.name if op else ""

    def _fresh(self, prefix: str) -> str:
        return next(
            name for n in range(len(self._names) + 1) if (name := f"{prefix}{n}") not in self._names
        )

    def _add_partitions(self, types: Sequence[TensorType], attrs: Mapping[str, Any]) -> None:
        """Of values, with the attributes of what made them: copies bring names with them."""
        self._partitions.add(types, attrs)
        self._names.update(t.ends.name for t in types if t.ends)

    def _new_name(self, name: str) -> str:
        if (
            not isinstance(name, str)
            or not _NAME.fullmatch(name)
            or keyword.iskeyword(name)
            or _TAKEN.fullmatch(name)
        ):
            raise FusionError(
                f"the name {name!r}",
                expected="letters, digits and _; not fd, i0, t0 or what else texts of a Fusion use",
            )
        if name in self._names:
            raise FusionError(
                f"the name {name!r} is taken",
                expected="a new name for each size and each partition",
            )
        self._names.add(name)
        return name


def _moved(attr: Any, sizes: Mapping[str, AnySize], groups: Mapping[Groups, Groups]) -> Any:
    """An attribute of another Fusion, with the sizes and partitions of this one."""
    if isinstance(attr, tuple):
        return tuple(_moved(a, sizes, groups) for a in attr)
    if isinstance(attr, Groups):
        return groups.get(attr, attr)
    if isinstance(attr, Rows):
        return Rows(value(attr.total, sizes), groups.get(attr.groups, attr.groups), attr.align)
    return attr.value(sizes) if isinstance(attr, Size) else attr


def rows_like(dim: Dim, total: AnySize) -> Dim:
    """`total` rows, partitioned like `dim` if that has as many."""
    return dim if isinstance(dim, Rows) and dim.total == total else total


def _caller() -> str:
    """file:line of the nearest frame outside the IR: the translator that makes an operation."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
