"""The type of a module's codes and scales, and what torch's functions do with it: whoever handles
all parameters of a model alike meets bytes that are no numbers.

Copies, moves, views and comparisons work, and give the same type as long as the dtype stays. An
average of equal parts is that part. Floats may be read as float32. Other arithmetic, casts and
initial values are refused in a sentence. Operations of this and other libraries see plain tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partialmethod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError

# Inside of it torch's functions take parts for plain tensors. An operation that reads parts saves
# 3 us there, and a compiled program has no guards on what is defined here.
as_plain_tensors = torch._C.DisableTorchFunctionSubclass

_KINDS = {
    # gives parts, or what says nothing of their values
    "move": """
        __array__ __contains__ __deepcopy__ __dlpack__ __dlpack_device__ __float__ __format__
        __getitem__ __len__ __reduce_ex__ __repr__ __reversed__ __setstate__ _typed_storage
        _has_compatible_shallow_copy_type alias as_strided chunk clone contiguous cpu cuda data_ptr
        detach detach_ dim element_size empty_like expand expand_as flatten flip gather get_device
        index_select item lift_fresh movedim moveaxis narrow ndimension nelement new_empty
        new_empty_strided new_zeros numel numpy permute pin_memory ravel record_stream repeat
        requires_grad_ reshape reshape_as resize_ retain_grad select set_ share_memory_ size slice
        split split_with_sizes squeeze squeeze_ storage storage_offset storage_type stride swapaxes
        swapdims t take tensor_split tile tolist transpose transpose_ unbind unflatten unfold
        unsqueeze unsqueeze_ untyped_storage view view_as xpu zeros_like .data .T .mT .H .mH""",
    # of torch.distributed: bytes, from rank to rank
    "send": """
        all_gather all_gather_into_tensor all_to_all all_to_all_single broadcast irecv isend recv
        send""",
    # copies several tensors into one
    "join": "__setitem__ cat concat concatenate copy_ stack .data=",
    # may change the dtype
    "cast": """
        _to_copy bfloat16 bool byte cdouble cfloat chalf char double float half int long short to
        type type_as""",
    "compare": "__eq__ __ge__ __gt__ __le__ __lt__ __ne__ eq ge gt le lt ne",
    "same": "allclose equal",
    "finite": "isfinite isinf isnan isneginf isposinf",
    "plain": "as_subclass",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_KEEPS = ("move", "join", "cast")  # what gives the same type, if not another dtype
_FREE = (".", "_is_", "is_", "register_")  # attributes, questions, hooks


class Encoded(Tensor):
    """A copy or view of a parameter's codes or scales. Files have plain tensors.

    holds: which ones, for errors.
    """

    holds = "codes or scales"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What `_call` does. Operations called as such are those of compiled graphs, whose values
        are plain.
        """
        with as_plain_tensors():
            if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
                return func(*args, **kwargs or {})
            return _call(func, _name(func), args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            new: Any = plain(self).clone(memory_format=torch.preserve_format)
            if isinstance(self, nn.Parameter):
                new = nn.Parameter(new, requires_grad=False)
            memo[id(self)] = encoded(new, self.holds, _kind(self))
            new.__dict__.update(self.__dict__)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


class Stored(Encoded):
    """Codes or scales in a state dict, whose bytes anybody may read and write. Only averages are
    those of parts: torch would truncate them.
    """


class EncodedParameter(Encoded, nn.Parameter):
    """Codes or scales as a parameter. Copies and pickles keep the type."""

    def __new__(cls, data: Tensor, requires_grad: bool = False, **attributes: Any) -> Any:
        """As of `nn.Parameter`, without a gradient. For a tensor of another type, such as a fake
        one, it is torch's.
        """
        new: Any = plain(data).detach()
        if type(new) is not Tensor:
            return nn.Parameter(new, requires_grad=False)
        new.__class__ = cls
        new.__dict__.update(attributes)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By its bytes, if torch's own pickles of the dtype cannot be read: of 8-bit floats."""
        data = plain(self)
        as_bytes = data.is_floating_point() and data.element_size() == 1
        return _parameter, (data.view(torch.uint8) if as_bytes else data, self.__dict__, data.dtype)


def _parameter(data: Tensor, attributes: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    return EncodedParameter(data if dtype is None else data.view(dtype), **attributes)


torch.serialization.add_safe_globals([_parameter])


def plain(t: Tensor) -> Tensor:
    """t in the same memory, without the type."""
    if not isinstance(t, Encoded):
        return t
    with as_plain_tensors():
        return t.detach() if is_dtensor(t) else t.as_subclass(Tensor)


def encoded(t: Any, holds: str, kind: type[Encoded] = Encoded) -> Any:
    """t as one that holds codes or scales: the same object if it is a plain tensor or parameter.
    So does a DTensor; tensors of other types stay.
    """
    if type(t) is Encoded and isinstance(t, nn.Parameter):
        t = EncodedParameter(t)
    if type(t) in (Tensor, nn.Parameter):
        t.__class__ = EncodedParameter if type(t) is nn.Parameter else kind
        t.holds = holds
    elif is_dtensor(t) and not isinstance(t, Encoded):
        t.__class__ = _shard_type(type(t), kind)  # type: ignore[arg-type]
        t.holds = holds
    return t


def _kind(t: Encoded) -> type[Encoded]:
    return Stored if isinstance(t, Stored) else Encoded


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor. If one exists, its module has been imported already."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


@cache
def _shard_type(dtensor: type[Tensor], kind: type[Encoded]) -> Any:
    return type(f"{kind.__name__}DTensor", (kind, dtensor), {})


# What functions do --------------------------------------------------------------------------------


def _name(func: Any) -> str:
    """What one of torch's functions is called: an attribute ".name", ".name=" if it is set."""
    name = str(func.__name__)
    ends = {"__get__": "", "__set__": "="}
    return f".{func.__self__.__name__}{ends[name]}" if name in ends else name


def _call(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of torch with parts among its arguments, which it takes for plain tensors."""
    if name.startswith("_foreach_"):
        return _each(func, name, args, kwargs)
    if (formula := _AVERAGES.get(name.removesuffix("_"))) is not None:
        return _average(func, name, formula, args, kwargs)
    part, kind = next(_parts_among(args, kwargs)), _KIND_OF.get(name, "")
    if isinstance(part, Stored) and kind != "same":
        return (
            _retyped(func(*args, **kwargs), part, args) if kind in _KEEPS else func(*args, **kwargs)
        )
    if not kind and not name.startswith(_FREE):
        raise _refusal(name, part)
    if kind == "same":
        return _same(*args[:2])
    if kind == "finite":  # of 8-bit floats torch has none of these
        return func(part.float() if part.is_floating_point() else part)
    if kind == "cast" and args[0] is part:
        casts = func(part.new_empty(0), *args[1:], **kwargs)
        exact = part.is_floating_point() and getattr(casts, "dtype", None) == torch.float32
        if isinstance(casts, Tensor) and casts.dtype != part.dtype and not exact:
            raise _refusal(f"{name}, to {casts.dtype},", part)
    if name == "view" and any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        return func(*args, **kwargs)  # who asks for bytes gets numbers
    if kind == "join":
        joined = (args[0], args[-1]) if name == "__setitem__" else _tensors(args, kwargs)
        if name == ".data=" and _widens(part, args[-1]):
            return None
        for t in joined:
            if getattr(t, "dtype", None) != part.dtype:
                raise _refusal(f"{name} with {getattr(t, 'dtype', t)}", part)
    result = func(*args, **kwargs)
    return _retyped(result, part, args) if kind in _KEEPS else result


def _widens(part: Tensor, t: Tensor) -> bool:
    """Whether t may be what scripts of QLoRA make of a scale in 16 bits, which stays as it is."""
    return t.dtype == torch.float32 and part.dtype in (torch.bfloat16, torch.float16)


def _retyped(result: Any, part: Encoded, args: Sequence[Any]) -> Any:
    """What a copy or view of a part gives, as a part too."""
    if isinstance(result, (list, tuple)):
        return type(result)(_retyped(t, part, args) for t in result)
    whole = type(result) is Tensor or is_dtensor(result)
    if whole and result.dtype == part.dtype and not any(result is t for t in args):
        return encoded(result, part.holds, _kind(part))
    return result


def _each(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of lists: parts one by one, all others together."""
    if not args or any(isinstance(a, (list, tuple)) for a in kwargs.values()):
        raise _refusal(name, next(_parts_among(args, kwargs)))
    count, one = len(args[0]), name.removeprefix("_foreach_")

    def at(places: Sequence[int]) -> list[Any]:
        return [
            [a[i] for i in places] if isinstance(a, (list, tuple)) and len(a) == count else a
            for a in args
        ]

    def has_part(i: int) -> bool:
        return any(isinstance(a[0], _Part) for a in at([i]) if isinstance(a, list))

    results: list[Any] = [None] * count
    for i in filter(has_part, range(count)):
        alone = [a[0] if isinstance(a, list) else a for a in at([i])]
        results[i] = _call(getattr(Tensor, one, None), one, alone, kwargs)
    others = [i for i in range(count) if not has_part(i)]
    if others:
        for i, t in zip(others, func(*at(others), **kwargs) or (), strict=False):
            results[i] = t
    return None if name.endswith("_") else results


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for a in (*args, *kwargs.values()):
        if isinstance(a, (list, tuple)):
            yield from _tensors(a, {})
        elif isinstance(a, (Tensor, _Multiple)):
            yield a


def _parts_among(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for t in _tensors(args, kwargs):
        if isinstance(t, _Part):
            yield t


def _refusal(what: str, part: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{what} of {part.holds} {[*part.shape]}",
        expected="copies, moves, comparisons, or an average of equal ones",
        todo="leave out parameters that do not train (requires_grad is False), or take numbers: "
        "fusion_moe.encodings.dequantize(module.weight_of(name))",
    )


# Averages -----------------------------------------------------------------------------------------


class _Multiple:
    """A part times a factor, on the way to an average: once a part, it is a tensor again."""

    __torch_function__ = Encoded.__torch_function__
    dtype = None

    def __init__(self, part: Any, factor: float):
        self.part, self.factor = part, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def _with(self, other: Any, name: str) -> Any:
        with as_plain_tensors():
            return _average(getattr(torch, name), name, _AVERAGES[name], (self, other), {})

    __add__ = __radd__ = partialmethod(_with, name="add")
    __sub__ = partialmethod(_with, name="sub")
    __mul__ = __rmul__ = partialmethod(_with, name="mul")
    __truediv__ = partialmethod(_with, name="div")


_Part = (Encoded, _Multiple)


class _NoAverage(Exception):
    """Arithmetic whose result is no multiple of one part."""


def _term(x: Any) -> tuple[Any, float]:
    """A part, None for zero, and its factor."""
    if isinstance(x, Encoded):
        return x, 1.0
    if isinstance(x, _Multiple):
        return x.part, x.factor
    if isinstance(x, (int, float)) and x == 0:  # where `sum` begins
        return None, 0.0
    raise _NoAverage


def _number(x: Any) -> float:
    if isinstance(x, _Part) or (isinstance(x, Tensor) and x.numel() != 1):
        raise _NoAverage
    return float(x)


def _times(x: Any, factor: float) -> _Multiple:
    part, times = _term(x)
    return _Multiple(part, times * factor)


def _plus(x: Any, y: Any, factor: Any = 1) -> _Multiple:
    """x + y * factor"""
    (a, times), (b, more) = _term(x), _term(y)
    if not (a is None or b is None or _same(a, b)):
        raise _NoAverage
    return _Multiple(b if a is None else a, times + more * _number(factor))


def _product(x: Any, y: Any) -> _Multiple:
    return _times(x, _number(y)) if isinstance(x, _Part) else _times(y, _number(x))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal bytes, which waits for the device."""
    if a is b or (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device) or a.is_meta:
        return a is b or (a.is_meta and b.is_meta and a.shape == b.shape)
    bits = _BITS[a.dtype.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# the names of arguments are torch's; with others, such as `out`, it is no average
_AVERAGES: dict[str, Callable[..., _Multiple]] = {
    "add": lambda input, other, alpha=1: _plus(input, other, alpha),
    "sub": lambda input, other, alpha=1: _plus(input, other, -alpha),
    "__rsub__": lambda input, other: _plus(other, input, -1),
    "mul": lambda input, other: _product(input, other),
    "div": lambda input, other: _times(input, 1 / _number(other)),
    "true_divide": lambda input, other: _times(input, 1 / _number(other)),
    "lerp": lambda input, end, weight: _plus(_times(input, 1 - _number(weight)), end, weight),
    "addcdiv": lambda input, tensor1, tensor2, value=1: _plus(
        input, tensor1, value / _number(tensor2)
    ),
}


def _average(
    func: Any,
    name: str,
    formula: Callable[..., _Multiple],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """A step of an average: a part if it is one, and in place nothing changes."""
    parts = [*_parts_among(args, kwargs)]
    try:
        result = formula(*args, **kwargs)
    except (_NoAverage, TypeError, ZeroDivisionError):
        if len(parts) == 1 and isinstance(parts[0], Stored):
            return func(*args, **kwargs)
        result = None
    is_part = result is not None and abs(result.factor - 1) < 1e-6
    in_place = name.endswith("_") and not name.startswith("__")
    if result is None or (in_place and not (is_part and isinstance(args[0], Encoded))):
        raise _refusal(name, parts[0])
    if in_place:
        return args[0]
    return _retyped(plain(result.part).clone(), result.part, ()) if is_part else result
