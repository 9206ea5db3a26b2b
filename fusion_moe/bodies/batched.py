"""`torch.vmap`: a call for each element of the batch, whose results are stacked. No kernel has an
axis for that; rows of one call are what this library batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..definitions.operations import LIBRARY, SPECS
from ..definitions.run import NAMESPACE, RUN, RUN_INTO
from ..errors import UnsupportedError


def _vmapped(name: str, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation as called inside of `torch.vmap`."""
    # what torch.library.register_vmap calls, which takes no tensors as keywords
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter: Any = retrieve_current_functorch_interpreter()
    operation = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return operation(*args, **kwargs)

    return custom_function_call_vmap_helper(
        interpreter, partial(_each, name, call), call, args, kwargs
    )


def _each(
    name: str, call: Callable[..., Any], info: Any, in_dims: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """The results of all elements, stacked in front, and where that is."""
    if not info.batch_size:
        raise UnsupportedError("vmap over no elements", expected="at least one", where=name)

    def of(element: int) -> Any:
        def pick(t: Any, dim: int | None) -> Any:
            return t if dim is None else t.select(dim, element)

        return call(*tree_map(pick, (args, kwargs), in_dims))

    first, *others = map(of, range(info.batch_size))
    stacked = tree_map(lambda *ts: torch.stack(ts), first, *others)
    return stacked, tree_map(lambda _: 0, first)


def _refused(name: str, text: str, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(text, expected="a call for each element of the batch", where=name)


def implement(name: str) -> None:
    """Defines an operation under `torch.vmap`, and refuses batches of gradients."""
    LIBRARY.impl(name, partial(_vmapped, name), "FuncTorchBatched", with_keyset=True)
    batch = "a batch of gradients (is_grads_batched or vectorize=True)"
    LIBRARY.impl(name, partial(_refused, name, batch), "Batched")


for _name in (*SPECS, *RUN):
    implement(_name)
for _name in RUN_INTO:
    written = "torch.vmap of what writes into its arguments"
    LIBRARY.impl(_name, partial(_refused, _name, written), "FuncTorchBatched")
