"""What a trace has, as the IR has it: sizes, types of tensors, and arguments that are not tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .errors import Error, Untranslatable
from .ir.sizes import AnySize, symbol
from .ir.types import TensorType, dtype_name


class Sizes:
    """The sizes of one traced region: torch.SymInt -> Size, and back to SymInt. Symbols are called s0, s1, ... in order of first use.

    An expression that is not a polynomial (a floor division, a minimum) becomes a symbol of its own.
    """

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._seen: dict[str, torch.SymInt] = {}
        self._shape_env: Any = None

    def size(self, n: int | torch.SymInt) -> AnySize:
        """n as a size of the IR."""
        if isinstance(n, int):
            return n
        self._shape_env = n.node.shape_env
        expr = n.node.expr
        if expr.is_Symbol:
            self._seen[self._name(expr)] = n
        return self._of(expr, n)

    def shape(self, shape: Sequence[int | torch.SymInt]) -> tuple[AnySize, ...]:
        """A shape as sizes of the IR."""
        return tuple(self.size(n) for n in shape)

    def expressions(self) -> Mapping[str, Any]:
        """The expression that each symbol stands for."""
        return {name: expr for expr, name in self._names.items()}

    def values(self) -> dict[str, Any]:
        """A SymInt for each symbol, with which the sizes of outputs are computed."""
        unseen = {name: expr for name, expr in self.expressions().items() if name not in self._seen}
        return self._seen | {name: self._shape_env.create_symintnode(expr, hint=None) for name, expr in unseen.items()}

    def _of(self, expr: Any, n: torch.SymInt) -> AnySize:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return symbol(self._name(expr))
        if expr.is_Add or expr.is_Mul:
            terms = [self._of(a, n) for a in expr.args]
            total: AnySize = terms[0]
            for term in terms[1:]:
                total = total + term if expr.is_Add else total * term
            return total
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            base, power = self._of(expr.base, n), int(expr.exp)
            return base if power == 1 else base * self._of(expr.base ** (power - 1), n)
        return symbol(self._name(expr))

    def _name(self, expr: Any) -> str:
        return self._names.setdefault(expr, f"s{len(self._names)}")


def tensor_type(dtype: torch.dtype, shape: Sequence[AnySize]) -> TensorType:
    """The type of a tensor whose sizes are sizes of the IR. fp4 tensors count as uint8."""
    return TensorType(tuple(shape), _name_of(torch.uint8 if dtype == torch.float4_e2m1fn_x2 else dtype))


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
