"""User-registered converters: what `quantize_` makes of a class of experts that the library does
not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ...errors import Error, OptionError, UnsupportedError
from ..config import NVFP4Config

Converter = Callable[[Any, NVFP4Config], nn.Module]
C = TypeVar("C", bound=Converter)

_registered: dict[type[nn.Module], Converter] = {}


def register_converter(cls: type[nn.Module]) -> Callable[[C], C]:
    """A decorator: the function makes the module that replaces an instance of `cls` or of a class
    derived from it.

        @fusion_moe.register_converter(MyExperts)
        def to_nvfp4(experts, config):
            return NVFP4Experts.from_float(experts.gate_up, experts.down, config.activation_format)

    to_nvfp4(experts: cls, config: NVFP4Config) -> nn.Module, which is called as `experts` was: same
    arguments, same results. `quantize_` and `fusion_moe.nn.convert` call the function; it takes
    precedence over the library's own converter of a class. `quantize_` calls it twice: first with
    parameters on the meta device, so that a model is not changed at all if a part of it cannot be
    converted, and then with real ones. So the function must not read values on the host (`.item()`)
    and must leave `experts` unchanged. During conversion, UnsupportedError says that it failed or
    did not return a new module.

    Args:
        cls: a class of modules.

    Raises:
        OptionError: if `cls` is not a class of modules or is torch.nn.Module itself, if the
            function cannot be called, and if the class already has a converter
            (`fusion_moe.nn.unregister_converter` removes it).
    """
    _check_class(cls)

    def register(function: C) -> C:
        if not callable(function):
            raise OptionError(
                f"the converter {function!r}",
                expected="a function of the module and an NVFP4Config",
                where=_where(cls),
            )
        if cls in _registered:
            todo = "fusion_moe.nn.unregister_converter(cls) takes the first away"
            raise OptionError(
                "a second converter", expected="one for each class", todo=todo, where=_where(cls)
            )
        _registered[cls] = function
        return function

    return register


def unregister_converter(cls: type[nn.Module]) -> None:
    """Removes what `register_converter` registered; does nothing for a class without a
    converter.
    """
    _registered.pop(cls, None)


def registered_converter(module: nn.Module) -> Converter | None:
    """The converter that a user registered for a module's class, or for its nearest base class."""
    cls = next((c for c in type(module).__mro__ if c in _registered), None)
    return None if cls is None else _checked(cls, _registered[cls])


def _checked(cls: type[nn.Module], function: Converter) -> Converter:
    def convert(module: nn.Module, config: NVFP4Config) -> nn.Module:
        try:
            replacement = function(module, config)
        except Error:
            raise
        except Exception as error:
            todo = "it is called with parameters on the meta device first, which have no values"
            found = f"the converter of {cls.__name__} failed: {type(error).__name__}: {error}"
            raise UnsupportedError(found, expected="a module in its place", todo=todo) from error
        if (
            not isinstance(replacement, nn.Module)
            or replacement is module
            or isinstance(replacement, cls)
        ):
            description = (
                "the module itself" if replacement is module else f"a {type(replacement).__name__}"
            )
            expected = f"a new module, which is no {cls.__name__}"
            raise UnsupportedError(
                f"the converter of {cls.__name__} returned {description}", expected=expected
            )
        return replacement

    return convert


def _check_class(cls: object) -> None:
    if not isinstance(cls, type) or not issubclass(cls, nn.Module) or cls is nn.Module:
        expected, todo = (
            "a class that derives from torch.nn.Module",
            "write @register_converter(MyExperts)",
        )
        raise OptionError(
            f"a converter of {cls!r}", expected=expected, todo=todo, where="register_converter"
        )


def _where(cls: type[nn.Module]) -> str:
    return f"register_converter({cls.__name__})"
