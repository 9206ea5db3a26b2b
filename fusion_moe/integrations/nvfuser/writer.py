"""Writes operations into an nvFuser definition. An operation with the same arguments is written
only once.

So values that several operations derive, such as group starts or a quantized activation, are a
single value of the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from ...ir import CeilDiv, Dim, Fusion, Size, Value, plain
from .library import dtype


class Writer:
    """`w.add(a, b)` is fd.ops.add(a, b).

    fusion: the Fusion that is being written; sizes: a number or a scalar of the definition for each
    of its symbols.
    """

    def __init__(self, fd: Any):
        self.fd = fd
        self.fusion = Fusion((), (), ())
        self.sizes: Mapping[str, Any] = {}
        self._made: dict[Any, Any] = {}
        self._kept: list[Any] = []  # kept alive, since their ids are keys

    def __getattr__(self, name: str) -> Callable[..., Any]:
        make = getattr(self.fd.ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            key = (name, self._key(args), self._key(tuple(sorted(kwargs.items()))))
            if key not in self._made:
                self._made[key] = make(*args, **kwargs)
            return self._made[key]

        return call

    def to(self, x: Any, name: str) -> Any:
        """x in a dtype of the IR, or of nvFuser, by name."""
        wanted = dtype(name)
        return x if x.dtype() == wanted else self.cast(x, dtype=wanted)

    def constant(self, value: float, name: str) -> Any:
        """A number with a dtype, as a value of the definition."""
        key = ("constant", repr(value), name)
        if key not in self._made:
            self._made[key] = self.fd.define_scalar(value, dtype=dtype(name))
        return self._made[key]

    def size(self, dim: Dim) -> Any:
        """A size: a number, or a scalar of the definition."""
        size = plain(dim)
        if not isinstance(size, Size):
            return size
        products = (
            reduce(self._times, (self._atom(a) for a in atoms), factor)
            for atoms, factor in size.terms
        )
        return reduce(lambda a, b: self.add(a, b), products)

    def shape(self, dims: tuple[Dim, ...]) -> list[Any]:
        """A shape as the definition's operations take it."""
        return [self.size(d) for d in dims]

    def spread(self, x: Any, shape: tuple[Dim, ...], *dims: int, repeats: bool = False) -> Any:
        """x whose dimension i becomes dimension dims[i] of `shape`, repeated along the others;
        repeats: also along those of size 1.
        """
        new = [i not in dims for i in range(len(shape))]
        y = self.broadcast(x, new) if any(new) else x
        wider = repeats or any(
            plain(d) != 1 for d, is_new in zip(shape, new, strict=True) if is_new
        )
        return self.expand(y, self.shape(shape)) if wider else y

    def part(self, x: Any, starts: list[Any], ends: list[Any]) -> Any:
        """x[start:end] along each dimension, of a value of the definition. Bounds must lie inside
        x: nvFuser is told not to clamp them.
        """
        return self.slice(x, starts, ends, [1] * len(starts), True)

    def filled(self, shape: tuple[Dim, ...], value: float, name: str) -> Any:
        """A tensor of the definition with this shape and dtype (`name`, "bf16") whose elements are
        all `value`.
        """
        return self.full(self.shape(shape), self.constant(value, name), dtype=dtype(name))

    def count(self, length: Dim, name: str = "i32") -> Any:
        """The vector 0, 1, ... length - 1."""
        zero, one = self.constant(0, name), self.constant(1, name)
        size = self.size(length)
        size = self.constant(size, "i64") if isinstance(size, int) else size
        return self.iota(size, zero, one, dtype=dtype(name))

    def stored(self, v: Value) -> str:
        """The 16-bit dtype to which the program rounds the result of a product."""
        return next(str(op.attrs["dtype"]) for op in self.fusion.readers[v])

    def _times(self, a: Any, b: Any) -> Any:
        return (
            a * b
            if isinstance(a, int) and isinstance(b, int)
            else b
            if a == 1
            else a
            if b == 1
            else self.mul(a, b)
        )

    def _atom(self, atom: str | CeilDiv) -> Any:
        if isinstance(atom, str):
            return self.sizes[atom]
        of = self.size(atom.of)
        return (
            -(-of // atom.by)
            if isinstance(of, int)
            else self.div(self.add(of, atom.by - 1), atom.by)
        )

    def _key(self, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._key, arg))
        if isinstance(arg, (int, float, bool, str, type(None))):
            return repr(arg)  # 0.0 == -0.0, True == 1
        self._kept.append(arg)
        return id(arg)
