"""What routers choose while a model runs, recorded where experts are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Patched, State, layers_of, patching, positional
from .routing import Routing, Rows


@contextmanager
def record_routing(model: nn.Module, weights: bool = True) -> Iterator[Routing]:
    """Records the experts of each token that a model computes inside the `with` block.

        with fusion_moe.record_routing(model) as routing:
            model(input_ids)
        with fusion_moe.replay_routing(model, routing):
            model(input_ids).loss.backward()

    Rows are in the order in which calls have tokens, [batch, sequence] flattened; after `generate`
    `Routing.sequences` sorts them. The tensors are those that experts got: nothing is copied, and
    nothing read on the host. While a CUDA graph is captured they are the graph's own, which each of
    its replays fills again: take a copy by indexing. Under `torch.compile` the graph breaks before
    the experts of each layer. What gradient checkpointing computes again is not recorded again.

    Args:
        model: one with transformers' experts interface, or experts of `fusion_moe.nn`, quantized or
            not, with adapters or not.
        weights: whether the weights of experts are recorded too, without their gradients.

    Raises:
        UnsupportedError: for a model without such experts, or whose ids are a rank's own.
    """
    layers = layers_of(model)
    routing = Routing({layer.name: layer.count for layer in layers})
    patched = [
        Patched(layer.experts, _recorded, _Record(routing.calls[layer.name], weights))
        for layer in layers
    ]
    try:
        yield routing
    finally:
        for patch in reversed(patched):
            patch.undo()


class _Record(State):
    """Of one layer."""

    def __init__(self, calls: list[Rows], weights: bool):
        self.calls, self.weights = calls, weights
        self.keep = torch.compiler.disable(self._keep)

    def _keep(self, ids: Tensor, weights: Tensor, copied: bool) -> None:
        if torch._C._current_graph_task_id() == -1:  # not in a backward
            ids, weights = ids.detach(), weights.detach()
            if copied:
                ids, weights = ids.clone(), weights.clone()
            self.calls.append((ids, weights if self.weights else None))


@patching
def _recorded(module: Any, record: _Record, *args: Any, **kwargs: Any) -> Any:
    args = positional(args, kwargs)
    # a compiled graph may write its next results where these are
    record.keep(args[1], args[2], torch.compiler.is_compiling())
    return record.inner(*args, **kwargs)
