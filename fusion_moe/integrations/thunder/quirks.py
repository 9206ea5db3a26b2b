"""Workarounds for thunder's versions, each with the upstream change that makes it unnecessary.
Tested: 0.2.6 and 0.2.7.dev20260201.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import thunder
import torch
from thunder.core.interpreter import get_interpreterruntimectx
from thunder.core.trace import get_tracectx

LIBRARIES = tuple(
    str(Path(file).parent) for file in (torch.__file__, thunder.__file__, Path(__file__).parents[1])
)


def at_users_line(symbol: Callable[..., Any]) -> Callable[..., Any]:
    """A symbol, or a function that calls some, that records the user's line when the interpreter
    calls it: bound symbols of an executor get that of the previous call.

    Unnecessary once thunder wraps the lookasides of executors like those of its own symbols
    (record_source_loc_in_symbol_header).
    """

    @functools.wraps(getattr(symbol, "meta", symbol))
    def call(*args: Any, **kwargs: Any) -> Any:
        frames = get_interpreterruntimectx().frame_stack
        users = [f for f in frames if not f.code.co_filename.startswith(LIBRARIES)] or frames
        get_tracectx().set_current_source_location(users[-1].code.co_filename, users[-1].positions)
        return symbol(*args, **kwargs)

    return call


def thunders_nvfuser(library: Any) -> Any:
    """The module of thunder's nvFuser executor; library: nvfuser_direct.

    0.2.6 asks a module `nvfuser` for the strides of inputs, which nvFuser 0.2.34 replaced by
    nvfuser_direct. Unnecessary without 0.2.6.
    """
    from thunder.executors import nvfuserex_impl

    sys.modules.setdefault("nvfuser", library)
    return nvfuserex_impl
