"""A call that is looked at, and the same call on fakes: copies of its model and tensors that have
types but no memory, so that tracing it computes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getclosurevars
from itertools import chain
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedError
from ..messages import log
from .backward import type_of

T = TypeVar("T")
_ASKS_FOR_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True)
class Call:
    """function(*args, **kwargs)."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def owner(self) -> Any:
        """The object that the function is a method of; else the function."""
        return getattr(self.function, "__self__", self.function)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The modules that are called, by the function's names for them; "" for the function itself
        or the object that it is a method of.
        """
        if isinstance(self.owner, torch.nn.Module):
            return {"": self.owner}
        if not isinstance(self.function, FunctionType):
            return {}
        names = getclosurevars(self.function)
        named = {**names.globals, **names.nonlocals}
        return {name: x for name, x in named.items() if isinstance(x, torch.nn.Module)}

    @property
    def device(self) -> torch.device:
        """The device of the arguments, else of the modules. The CPU if all are on the meta
        device.
        """
        tensors = chain(self.tensors, *(m.parameters() for m in self.modules.values()))
        return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))

    def __str__(self) -> str:
        """What is called, with the tensors that it is given: "Layer(bf16[6, 64])"."""
        called = self.owner if isinstance(self.owner, torch.nn.Module) else self.function
        name = getattr(called, "__name__", type(called).__name__)
        named = [("", t) for t in self.args] + [(f"{name}=", t) for name, t in self.kwargs.items()]
        inputs = (f"{name}{type_of(t)}" for name, t in named if isinstance(t, torch.Tensor))
        return f"{name.strip('<>')}({', '.join(inputs)})"


def on_fakes(
    look: Callable[[Call], T],
    call: Call,
    arranged: Callable[[torch.nn.Module], None] | None = None,
) -> T:
    """look(call) on fakes, with copies of the modules that are called; if that fails, on the
    originals. arranged: what is first done to each of the copies.

    Tensors on the meta device are taken to be on the device of the others. UnsupportedError if the
    originals have no values and the call asks for them.
    """
    # non-fakes: tensors of modules that are not found
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies = _Copies(mode)
    try:
        copies.device = call.device
        originals = call.function, call.modules, call.args, call.kwargs
        with torch.inference_mode(False), copies:
            function, modules, args, kwargs = copy.deepcopy(originals)
        with mode:
            if arranged:
                for module in modules.values():
                    arranged(module)
            return look(Call(_with_modules(function, modules), args, kwargs))
    except Exception as error:
        if copies.valueless and isinstance(error, _ASKS_FOR_VALUES):
            raise UnsupportedError(
                f"the call reads tensor values ({error})",
                expected="tensors with data: some are fake or on the meta device",
                todo="pass loaded weights and arguments, or a part of the model that reads none",
            ) from error
        if copies.valueless:
            raise
        log.info(
            "explaining the call by running it, since it cannot be traced without tensor "
            "data: %s: %s",
            type(error).__name__,
            error,
        )
    return look(call)


def device_of_values(call: Call) -> torch.device:
    """The device of a call's tensors. UnsupportedError if one of its arguments, or of the modules
    that it calls, has no values.
    """
    held = (t for m in call.modules.values() for t in (*m.parameters(), *m.buffers()))
    tensors = (*call.tensors, *held)
    if missing := [t for t in tensors if _is_valueless(t)]:
        raise UnsupportedError(
            f"a tensor {list(missing[0].shape)} that is fake or on the meta device",
            expected="tensors with data: the call is run",
            todo="pass loaded weights and arguments, or leave out measure and load",
            where="explain",
        )
    return call.device


def like(t: torch.Tensor, mode: FakeTensorMode, device: torch.device | None = None) -> torch.Tensor:
    """A fake in this mode with the shape, strides and dtype of a tensor that has no values to be
    copied.
    """
    with mode:
        fake = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device or t.device)
    return fake.requires_grad_(t.requires_grad)


class _Copies(TorchFunctionMode):
    """While active, copy.deepcopy makes fakes of tensors. device: for those on the meta device;
    valueless: whether one had no values.
    """

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.mode, self.device, self.valueless = mode, torch.device("cpu"), False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            t, memo = args
            if id(t) not in memo:
                memo[id(t)] = fake = self._fake(t)
                # what mark_dynamic has set
                fake.__dict__.update(
                    {k: v for k, v in t.__dict__.items() if k not in fake.__dict__}
                )
            return memo[id(t)]
        # for a parameter's data, which deepcopy then makes a parameter
        if func is torch._C.TensorBase.clone:
            return self._fake(args[0])
        return func(*args, **(kwargs or {}))

    def _fake(self, t: torch.Tensor) -> torch.Tensor:
        if not _is_valueless(t):
            return self.mode.from_tensor(t, static_shapes=True)
        self.valueless = True
        return like(t, self.mode, self.device if t.device.type == "meta" else t.device)


def _is_valueless(t: torch.Tensor) -> bool:
    return t.device.type == "meta" or isinstance(t, FakeTensor)


def _with_modules(
    function: Callable[..., Any], modules: dict[str, torch.nn.Module]
) -> Callable[..., Any]:
    """The function with these modules in place of its own. A module, or a method's object, has been
    copied as a whole.
    """
    if not isinstance(function, FunctionType) or not modules:
        return function
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(CellType(modules[name]) if name in modules else cell for name, cell in cells)
    names = {**function.__globals__, **modules}
    # with it, Dynamo would look the modules up in the function's own Python module
    names.pop("__name__", None)
    copied = FunctionType(code, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
