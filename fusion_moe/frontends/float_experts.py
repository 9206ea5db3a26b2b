"""Expert weights that are compiled in floating point, and advice about them, so that nobody has to
find out from a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from .. import plugins
from ..definitions import translate
from ..definitions.nodes import users_name
from ..messages import some, warn_once

_LEAST = 16  # features: weights of convolutions have three dimensions too, but a smaller last one


def float_experts(model: GraphModule) -> tuple[str, ...]:
    """The names of the 3-D float parameters that a Dynamo graph takes; none if it calls operations
    of this library or of users.

    Such operations take such weights on purpose, for training. What a graph writes is an
    optimizer's, or its own. Experts that a graph break leaves to Python are in no graph and not
    found.
    """
    ours = {t.op.rsplit(".", 1)[0] for t in translate.registered() if not t.op.startswith("aten::")}
    nodes = [n for m in model.modules() if isinstance(m, GraphModule) for n in m.graph.nodes]
    if any(_operation(n) in ours for n in nodes):
        return ()
    written = {m for n in nodes if _writes(n) for m in n.all_input_nodes}
    return tuple(
        dict.fromkeys(
            users_name(n)
            for n in model.graph.nodes
            if n not in written and not _writes(n) and _is_experts(n)
        )
    )


def experts_outside(model: Any) -> tuple[str, ...]:
    """The names of the 3-D float parameters of a module, and of its lists of experts: for those of
    which no graph was captured.
    """
    if not isinstance(model, torch.nn.Module):
        return ()
    lists = (
        name
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.ModuleList) and name.endswith("experts")
    )
    return (*(name for name, p in model.named_parameters() if _may_be_experts(p)), *lists)


def advice(names: Sequence[str]) -> str:
    """The advice about such weights."""
    return (
        f"expert weights in floating point: {some(names)}; "
        "fusion_moe.quantize_(model) packs them in NVFP4"
        + "".join(f"; to train them, {how()}" for how in plugins.training)
    )


def warn_of_float_experts(model: GraphModule) -> None:
    """Logs the advice once in a process: a model may have many graphs, each compiled many times."""
    if names := float_experts(model):
        warn_once(advice(names), about="float_experts")


def _operation(n: Node) -> str:
    """The name of the operation that a node calls, without its overload; "" for any other node."""
    if isinstance(n.target, OpOverload):
        return n.target.name().rsplit(".", 1)[0]
    return n.target._qualified_op_name if isinstance(n.target, OpOverloadPacket) else ""


def _writes(n: Node) -> bool:
    """Whether a call changes its arguments: by torch's convention its name then ends in an
    underscore.
    """
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    return (
        n.op.startswith("call_")
        and name.partition(".")[0].endswith("_")
        and not name.endswith("__")
    )


def _is_experts(n: Node) -> bool:
    x = n.meta.get("example_value")
    return isinstance(x, torch.nn.Parameter) and _may_be_experts(x)


def _may_be_experts(x: torch.Tensor) -> bool:
    if x.dim() != 3 or not x.is_floating_point():
        return False
    return all(not isinstance(size, int) or size >= _LEAST for size in x.shape[1:])
