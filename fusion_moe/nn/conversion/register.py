"""User-registered converters: what `quantize_` makes of a class of experts that the library does
not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ...errors import Error, OptionError, UnsupportedError
from ..config import QuantizationConfig

Converter = Callable[[Any, QuantizationConfig], nn.Module]
C = TypeVar("C", bound=Converter)

_registered: dict[type[nn.Module], Converter] = {}


def register_converter(cls: type[nn.Module]) -> Callable[[C], C]:
    """A decorator: the function makes the module that replaces an instance of `cls` or of a class
    derived from it.

        @fusion_moe.register_converter(MyExperts)
        def to_nvfp4(experts, config):
            return NVFP4Experts.from_float(
                experts.gate_up, experts.down, config.activation_format, scales=config.scales
            )

    to_nvfp4(experts: cls, config: QuantizationConfig) -> nn.Module, which is called as `experts`
    was: same arguments, same results. config.encoding is the format that was asked for: another one
    is an UnsupportedError. `quantize_` and `fusion_moe.nn.convert` call the function; it takes
    precedence over the library's own converter of a class. They call it twice: first with
    parameters on the meta device, so that a model is not changed at all if a part of it cannot be
    converted, and then with real ones. So the function must not read values on the host (`.item()`)
    and must leave `experts` unchanged. During conversion, UnsupportedError says that it failed or
    did not return a new module.

    `update_weights_` takes floats in the order of `from_float`. For a class that stores [E, K, N]
    under the same names, set `transposed = True` on what is made, and `interleaved = True` for rows
    of gate and up that alternate.

    Args:
        cls: a class of modules.

    Raises:
        OptionError: if `cls` is not a class of modules or is torch.nn.Module itself, and if the
            class already has a converter (`fusion_moe.nn.unregister_converter` removes it).
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or cls is nn.Module:
        raise OptionError(
            f"a converter of {cls!r}",
            expected="a class that derives from torch.nn.Module",
            todo="write @register_converter(MyExperts)",
            where="register_converter",
        )

    def register(function: C) -> C:
        if cls in _registered:
            raise OptionError(
                "a second converter",
                expected="one for each class",
                todo="fusion_moe.nn.unregister_converter(cls) takes the first away",
                where=f"register_converter({cls.__name__})",
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
    def convert(module: nn.Module, config: QuantizationConfig) -> nn.Module:
        try:
            replacement = function(module, config)
        except Error:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"the converter of {cls.__name__} failed: {type(error).__name__}: {error}",
                expected="a module in its place",
                todo="it is called with parameters on the meta device first, which have no values",
            ) from error
        if not isinstance(replacement, nn.Module) or isinstance(replacement, cls):
            raise UnsupportedError(
                f"the converter of {cls.__name__} returned a {type(replacement).__name__}",
                expected=f"a new module, which is no {cls.__name__}",
            )
        return replacement

    return convert
