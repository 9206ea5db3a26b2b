"""thunder.jit: our operations as symbols of thunder, and an executor that runs regions of a trace
through our pipeline.

    from fusion_moe.thunder import thunder_executors
    jitted = thunder.jit(model, executors=thunder_executors())

Needs lightning-thunder, which is imported by the first call and not before.

graph.py     a stretch of a trace as an FX graph of what the dispatcher is asked for
ops.py       operations of torch as symbols, with their derivatives
executor.py  the executor: regions of a trace become fusions
saved.py     what the backward reads, saved from writes
nvfuser.py   the same operations inside of thunder's own nvFuser regions
packed_grouped.py
             layers that hold NVFP4 weights as thunder's benchmarks do, for `quantize_`
quirks.py    what thunder's versions make necessary
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UnsupportedError
from ...frontends.regions import Found
from ...messages import install

if TYPE_CHECKING:
    from .executor import FusionMoe


def thunder_executors(nvfuser: bool = False) -> tuple[Any, ...]:
    """Our executor and after it thunder's defaults, for `thunder.jit(model, executors=...)` and
    `thunderfx(model, executors=...)`.

    Makes every operation that has a translator now known to thunder, with the derivative that torch
    knows of it. Afterwards the name "fusion_moe" stands for the executor: `thunder.jit(model,
    executors=["fusion_moe"])` is ours and none of the defaults.

    Args:
        nvfuser: thunder's nvFuser executor comes first and takes these operations into its own
            regions, by the same translators; ours has what it refuses.

    Raises:
        UnsupportedError: where there is no thunder that imports, or nvFuser is asked for and
            thunder cannot use it.
    """
    executor = thunder_executor()
    from thunder.extend import get_default_executors

    first = (*_with_nvfuser(executor), executor) if nvfuser else (executor,)
    defaults = [e for e in get_default_executors() if e not in first]
    if any(e.name == "nvfuser" for e in defaults) and importlib.util.find_spec("nvfuser_direct"):
        from .quirks import thunders_nvfuser

        thunders_nvfuser(importlib.import_module("nvfuser_direct"))
    return (*first, *defaults)


def thunder_executor() -> FusionMoe:
    """Our executor alone. UnsupportedError where there is no thunder that imports."""
    need_thunder()
    from .executor import executor

    executor.symbols.register_translated()
    return executor


def found_in(
    function: Callable[..., Any], args: Any, kwargs: Any, executors: Any = None
) -> list[Found]:
    """What is fused, and what not and why, in the forward pass of a call of a function or a module.

    The call is traced anew, nothing of it is run, and what `function` compiled before stays as it
    is. executors: those of what thunder.jit made of it before; None: ours and thunder's defaults.
    """
    executor = thunder_executor()
    import thunder

    if executors is None:
        executors = thunder_executors()
    elif executor not in executors:
        executors = (executor, *executors)
    anew = thunder.jit(function, executors=executors)
    with executor.listening() as heard:
        thunder.compile_data(anew).get_computation_and_inputs(*args, **kwargs)
    return heard


def _with_nvfuser(executor: FusionMoe) -> tuple[Any, ...]:
    """What writes our operations as nvFuser takes them, and thunder's nvFuser executor."""
    from .nvfuser import ForNvFuser

    if executor.for_nvfuser is None:
        executor.for_nvfuser = ForNvFuser(executor.symbols)
    return executor.for_nvfuser, executor.for_nvfuser.impl.ex


def need_thunder() -> None:
    """UnsupportedError if thunder cannot be imported: with a newer torch it misses names."""
    try:
        importlib.import_module("thunder")
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "thunder"
        raise UnsupportedError(
            "thunder is not installed"
            if absent
            else f"thunder does not import with torch {torch.__version__}: "
            f"{type(error).__name__}: {error}",
            expected="lightning-thunder 0.2.6 or newer, and a torch that it supports",
            todo=f"{install('thunder')} installs both",
        ) from error
