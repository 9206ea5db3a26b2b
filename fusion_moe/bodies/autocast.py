"""The operations under torch.autocast: products and biases are computed in autocast's dtype, as
torch's linear does.

Float activations, weights and biases are cast; float64, packed codes, scales and the router's
weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

from ..definitions.operations import LIBRARY, SPECS, Spec, named_arguments
from ..ir import dtype_name

_CAST = (torch.float32, torch.bfloat16, torch.float16)
_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


def _autocast(spec: Spec, device: str, *args: Any, **kwargs: Any) -> Any:
    """An operation as called under autocast: it is called again, without autocast, on the cast
    tensors.
    """
    dtype = torch.get_autocast_dtype(device)

    def cast(v: Any) -> Any:
        return (
            v.to(dtype)
            if isinstance(v, Tensor) and v.device.type == device and v.dtype in _CAST
            else v
        )

    named = named_arguments(spec.name, args, kwargs)
    named |= casted(spec, named, cast, dtype)
    with _ExcludeDispatchKeyGuard(DispatchKeySet(_KEYS[device])):
        return getattr(torch.ops.fusion_moe, spec.name)(**named)


def casted(
    spec: Spec, arguments: Mapping[str, Any], cast: Callable[[Any], Any], dtype: torch.dtype
) -> dict[str, Any]:
    """The arguments that change, after casting. cast: makes `dtype` of a tensor of another one, if
    autocast does; leaves the rest.
    """
    changed = {name: cast(arguments[name]) for name in spec.autocast}
    # weights that are float tensors in row-major order
    if (
        arguments.get("weight_format", "") in map(dtype_name, _CAST)
        and arguments["weight_layout"] == "linear"
    ):
        changed |= {name: [cast(t) for t in arguments[name]] for name in spec.weights} | {
            "weight_format": dtype_name(dtype)
        }
    return changed


def _register() -> None:
    for spec in SPECS.values():
        if spec.autocast:
            for device, key in _KEYS.items():
                LIBRARY.impl(spec.name, partial(_autocast, spec, device), key.name)


_register()
