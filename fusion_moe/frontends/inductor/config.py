"""The mode and options of torch.compile: separates ours, and checks Inductor's settings by name and
type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor import config

from ...errors import OptionError, did_you_mean
from ...options import Options

_PREFIX = "fusion_moe."


def separate(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(our options, without their prefix; Inductor's)."""
    own = {k[len(_PREFIX) :]: v for k, v in options.items() if k.startswith(_PREFIX)}
    return own, {k: v for k, v in options.items() if not k.startswith(_PREFIX)}


def inductor_config(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a mode and options. OptionError if it does not know them or their
    values.
    """
    known = config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            own = [_PREFIX + o for o in Options.__dataclass_fields__]
            raise OptionError(
                f"unknown option {name!r}",
                expected=f"an option of Inductor, or one of {', '.join(own)}",
                todo=did_you_mean(name, [*known, *own]),
                where="torch.compile(options=...)",
            )
    try:
        return torch._TorchCompileInductorWrapper(mode, dict(options), None).config
    except RuntimeError as error:  # another mode, or a value of another type
        where = "torch.compile(mode=..., options=...)"
        raise OptionError(str(error), where=where) from None
