"""What a trace has, as the IR has it: sizes, types of tensors, and arguments that are not
tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add, mul
from typing import Any

import torch

from ..errors import Error, Untranslatable
from ..ir import AnySize, TensorType, dtype_name, symbol


def hint(n: int | torch.SymInt) -> Any:
    """The value of a size in the call that is traced; None if only running the program gives it.
    Adds no guard.
    """
    return n if isinstance(n, int) else n.node.hint


class Sizes:
    """The sizes of one traced region: torch.SymInt -> Size, and back to SymInt. Symbols are called
    s0, s1, ... in order of first use.

    An expression that is not a polynomial (a floor division, a minimum) becomes a symbol of its
    own.
    """

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._seen: dict[str, torch.SymInt] = {}
        self._shape_env: Any = None

    def size(self, n: int | torch.SymInt) -> AnySize:
        """A traced size as a size of the IR."""
        if isinstance(n, int):
            return n
        self._shape_env = n.node.shape_env
        expr = n.node.expr
        if expr.is_Symbol:
            self._seen[self._name(expr)] = n
        return self._of(expr)

    def shape(self, shape: Sequence[int | torch.SymInt]) -> tuple[AnySize, ...]:
        """A traced shape as sizes of the IR."""
        return tuple(self.size(n) for n in shape)

    def expressions(self) -> Mapping[str, Any]:
        """The expression that each symbol stands for."""
        return {name: expr for expr, name in self._names.items()}

    def values(self) -> dict[str, Any]:
        """A SymInt for each symbol, with which the sizes of outputs are computed."""
        unseen = {name: expr for name, expr in self.expressions().items() if name not in self._seen}
        return self._seen | {
            name: self._shape_env.create_symintnode(expr, hint=None)
            for name, expr in unseen.items()
        }

    def _of(self, expr: Any) -> AnySize:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Add or expr.is_Mul:
            return reduce(add if expr.is_Add else mul, map(self._of, expr.args))
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            return reduce(mul, [self._of(expr.base)] * int(expr.exp))
        return symbol(self._name(expr))

    def _name(self, expr: Any) -> str:
        return self._names.setdefault(expr, f"s{len(self._names)}")


def equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal, which a tracer guards.

    s0 == s2 and s1 == s3 make two symbols of four; from s0*s1 == s2*s3 the tracer concludes
    nothing. So if the factors of two products are equal in pairs, each pair is guarded: calls with
    other factors are traced again.
    """
    return all(x == y for x, y in (*_pairs(a, b), (a, b)))


def may_be_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes have one value in the call that is traced, or one of them has none yet.
    Adds no guard.
    """
    return None in (hint(a), hint(b)) or hint(a) == hint(b)


def _pairs(a: int | torch.SymInt, b: int | torch.SymInt) -> list[tuple[torch.SymInt, torch.SymInt]]:
    """The factors that only one of two products has, in pairs of equal value; none if they do not
    pair up.
    """
    if isinstance(a, int) or isinstance(b, int):
        return []
    powers = (n.node.expr.as_powers_dict().items() for n in (a, b))
    of_a, of_b = (Counter({factor: int(exponent) for factor, exponent in of}) for of in powers)
    only = [list((of_a - of_b).elements()), list((of_b - of_a).elements())]
    # a symbol that is equal to it would become a constant
    if any(factor.is_number for factors in only for factor in factors):
        return []
    numbered = [[_factor(f, a.node.shape_env) for f in factors] for factors in only]
    if any(hint(n) is None for factors in numbered for _, n in factors):
        return []
    ours, theirs = (sorted(factors, key=lambda f: (hint(f[1]), f[0])) for factors in numbered)
    paired = [hint(n) for _, n in ours] == [hint(n) for _, n in theirs]
    return [(x, y) for (_, x), (_, y) in zip(ours, theirs, strict=True)] if paired else []


def _factor(expr: Any, shape_env: Any) -> tuple[int, torch.SymInt]:
    """A factor as a size, and which dimension of an input it is, which decides between factors of
    equal value.
    """
    dims = [
        dim
        for source in shape_env.var_to_sources.get(expr, ())
        if (dim := getattr(source, "idx", None)) is not None
    ]
    return dims[0] if dims else 0, shape_env.create_symintnode(expr, hint=None)


def tensor_type(dtype: torch.dtype, shape: Sequence[AnySize]) -> TensorType:
    """The type of a tensor whose sizes are sizes of the IR. fp4 tensors count as uint8."""
    return TensorType(
        tuple(shape), _name_of(torch.uint8 if dtype == torch.float4_e2m1fn_x2 else dtype)
    )


def _name_of(dtype: torch.dtype) -> str:
    try:
        return dtype_name(dtype)
    except Error as error:
        raise Untranslatable(error.found, expected=error.expected) from None


def plain_argument(value: Any, sizes: Sizes) -> Any:
    """An argument that is not a tensor, as translators get it."""
    if isinstance(value, torch.SymInt):
        return sizes.size(value)
    if isinstance(value, torch.dtype):
        return _name_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(plain_argument(v, sizes) for v in value)
    return value
