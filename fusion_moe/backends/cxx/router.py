"""Router operations as template arguments, which are the same in both C++ backends."""

from __future__ import annotations

from ...ir import Op, Value
from ...ir.kinds.router import compares_scores
from .product_plan import known

ROUTER = ("topk_ids", "topk_weights", "topk_weights_backward")


def of_choice(op: Op) -> str:
    """The arguments of TopK: experts, slots, and the method of choice."""
    a = op.attrs
    groups = [a.get("n_group", 1), a.get("topk_group", 1), a.get("best_of_group", 1)]
    by_scores = compares_scores(op.inputs[1], groups[0], groups[2])
    flags = [str(flag).lower() for flag in (_sigmoid(op), by_scores)]
    return ", ".join(map(str, [known(op.values[0].type.shape[1]), a["k"], *flags, *groups]))


def of_weights(op: Op) -> str:
    """How scores become weights: whether by sigmoids, whether renormalized."""
    return ", ".join(
        str(flag).lower() for flag in (_sigmoid(op), op.attrs.get("renormalize", False))
    )


def factor(op: Op) -> str:
    """The factor of the weights, as a float32."""
    return f"float({float(op.attrs.get('routed_scaling_factor', 1.0))!r})"


def bias(op: Op) -> Value | None:
    """The bias that is added to scores, if any."""
    return next(iter(op.values[1:]), None)


def _sigmoid(op: Op) -> bool:
    return op.attrs.get("scoring", "softmax") == "sigmoid"
