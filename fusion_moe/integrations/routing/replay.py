"""Recorded routing, given to a model's routers or experts while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ...errors import GroupsError, ShapeError, UnsupportedError, need_one_of
from ...messages import count, some
from .layers import ExpertsLayer, Patched, State, layers_of, patching, positional
from .routing import Routing, Rows

_TOPK = torch.topk, torch.Tensor.topk
_MASKED_FILL = torch.masked_fill, torch.Tensor.masked_fill
_CHECKPOINT = "_gradient_checkpointing_func"  # transformers' name


@contextmanager
def replay_routing(model: nn.Module, routing: Routing, weights: str = "own") -> Iterator[Replay]:
    """Has the tokens that a model computes inside the `with` block go to the experts of a routing.

    Each forward has exactly the routing's rows, in its order: give a micro-batch
    `routing[its rows]`, `Routing.padded(...)` or `Routing.packed(...)`. Layers are paired in the
    order of modules, so that a model with adapters may replay what one without recorded. Nothing is
    read on the host. Compiled code is not compiled again for other rows, only for another number.

    What transformers' gradient checkpointing computes again in the backward gets the same rows,
    also after the block; for another checkpointing function the backward belongs into the block.

    Args:
        model: as for `record_routing`.
        routing: its ids, and weights for "recorded", are copied to the device of each layer.
        weights: "own": weights come from the router's own logits of these experts, and gradients
            reach it. "recorded": those of the routing; the router gets no gradient.

    Yields:
        Replay: whose `copy_` gives a captured CUDA graph other rows.

    Raises:
        ShapeError: for other layers or another number of experts, and, when the model runs, for
            another number of tokens or of experts of a token.
        GroupsError: for ids on the host that are no expert's.
        UnsupportedError: for a router that does not choose by topk, which "recorded" needs not; if
            the block ends before the backward of what another function checkpoints.
    """
    need_one_of("weights", weights, ("own", "recorded"))
    replay = Replay(model, routing, weights == "own")
    with replay._checkpointed(model), replay._installed():
        yield replay
    if replay._open:
        raise UnsupportedError(
            f"{count(replay._open, 'layer')} with checkpointed activations, before the backward, "
            "which would choose experts anew",
            expected="the backward inside the block",
            todo="call model.gradient_checkpointing_enable() instead",
            where="replay_routing",
        )


class Replay:
    """A routing on its way through a model, in tensors that keep their addresses."""

    def __init__(self, model: nn.Module, routing: Routing, own: bool):
        self._layers, self._own, self.partial = layers_of(model), own, routing.partial
        self._open = 0  # calls that a checkpoint of others will make once more
        self._within = 0  # checkpoints of transformers
        self._given = [_Given(layer, *rows, own) for layer, rows in self._rows(routing)]

    def copy_(self, routing: Routing) -> None:
        """Other rows, as many, at the same addresses: for a CUDA graph that was captured inside the
        block.

        Raises:
            ShapeError: for other layers or numbers, or -1 where there was none.
        """
        rows = self._rows(routing)
        if routing.partial and not self.partial:
            raise ShapeError(
                "rows without experts", expected="experts in each row, as the first routing had"
            )
        found, want = (
            {given.name: list(given.ids.shape) for given in self._given},
            {layer.name: list(ids.shape) for layer, (ids, _) in rows},
        )
        if found != want:
            raise ShapeError(f"ids {found}", expected=f"{want}, as before")
        for given, (_, (ids, weights)) in zip(self._given, rows, strict=True):
            given.ids.copy_(ids)
            given.unknown.copy_(_unknown(given.ids))
            if given.weights is not None and weights is not None:
                given.weights.copy_(weights)

    def _rows(self, routing: Routing) -> list[tuple[ExpertsLayer, Rows]]:
        """Of each layer: [0, 0] where none were recorded."""
        if [layer.count for layer in self._layers] != [*routing.experts.values()]:
            raise ShapeError(
                f"a routing of {_listed(routing.experts)}",
                expected=f"{_listed({layer.name: layer.count for layer in self._layers})}, as the "
                "model",
            )
        names = zip(self._layers, routing.experts, strict=True)
        none = torch.empty(0, 0, dtype=torch.int64), None
        found = [
            (layer, routing.rows(name) if routing.calls[name] else none) for layer, name in names
        ]
        for layer, (ids, weights) in found:
            if not self._own and weights is None and ids.shape[1]:
                raise ShapeError(
                    "a routing without weights",
                    expected='weights, for weights="recorded"',
                    where=layer.name,
                )
            if ids.device.type == "cpu" and ids.numel():
                low, high = (int(bound) for bound in ids.aminmax())
                if low < -int(routing.partial) or high >= layer.count:
                    raise GroupsError(
                        f"expert {low if low < 0 else high}",
                        expected=f"0 to {layer.count - 1}",
                        where=layer.name,
                    )
        return found

    # What runs in the model's forward and backward ------------------------------------------------

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as undone:
            for given in self._given:
                for module in given.modules:
                    undone.callback(Patched(module, given.forward, _Step(self, given)).undo)
            yield

    @contextmanager
    def _checkpointed(self, model: nn.Module) -> Iterator[None]:
        """transformers' checkpoints run what they run again with this replay."""
        with ExitStack() as undone:
            for module in model.modules():
                if (theirs := vars(module).get(_CHECKPOINT)) is not None:
                    setattr(module, _CHECKPOINT, _Checkpointing(self, theirs))
                    undone.callback(setattr, module, _CHECKPOINT, theirs)
            yield

    def _checkpoint(self, theirs: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            function = partial(self._run, function)
        return theirs(function, *args, **kwargs)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._within += 1
        try:
            with self._installed() if _in_backward() else nullcontext():
                return function(*args, **kwargs)
        finally:
            self._within -= 1

    def count(self) -> None:
        """Counts calls that a checkpoint which is not transformers' will make once more."""
        if torch.compiler.is_compiling() or self._within:
            return
        if _in_backward():
            self._open -= 1
        elif _is_checkpointed():
            self._open += 1


class _Checkpointing:
    """transformers' checkpoint with a replay. A copy is transformers' own."""

    def __init__(self, replay: Replay, theirs: Any):
        self.replay, self.theirs = replay, theirs

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.replay._checkpoint(self.theirs, function, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (self.theirs,)


def _as_it_is(x: Any) -> Any:
    return x


def _is_checkpointed() -> bool:
    """Whether torch's checkpoint runs what calls this, for the first time."""
    if not torch.is_grad_enabled():  # the reentrant one, or nobody
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
            frame = frame.f_back
        return frame is not None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == CheckpointFunction.__module__


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class _Given:
    """The rows of a layer: ids int64[rows, k], weights float[rows, k] or None. unknown
    bool[rows, k]: rows with an id of -1; modules: what is given them, by way of `forward`.
    """

    def __init__(self, layer: ExpertsLayer, ids: Tensor, weights: Tensor | None, own: bool):
        self.name, self.count, self.forward = layer.name, layer.count, _chosen if own else _replaced
        self.modules = layer.choosers if own else (layer.experts,)
        if not ids.shape[1]:  # a layer that has no rows, and may not be called
            self.modules, self.forward = (layer.experts,), _refused
        if not self.modules and not layer.fixed:
            raise UnsupportedError(
                "a router that does not choose by topk",
                expected='weights="recorded"',
                where=layer.name,
            )
        of = next((p for m in self.modules for p in m.parameters() if not p.is_meta), ids)
        self.ids = ids.to(of.device, torch.int64, copy=True)
        self.unknown = _unknown(self.ids).expand_as(self.ids).clone()
        self.weights = None if own or weights is None else weights.to(of.device, copy=True)

    def need_rows(self, rows: int) -> None:
        """ShapeError for a call with another number of tokens."""
        if rows != len(self.ids):
            raise ShapeError(
                f"{count(len(self.ids), 'row')} of routing for {count(rows, 'token')}",
                expected="a row for each token, of padding too",
                todo="routing[rows], Routing.padded or Routing.packed",
                where=self.name,
            )


def _unknown(ids: Tensor) -> Tensor:
    """ids int[rows, k] -> bool[rows, 1]: not known as a whole, so that no expert comes twice."""
    return (ids < 0).any(1, keepdim=True)


class _Step(State):
    """What a module is given in calls of this replay."""

    def __init__(self, replay: Replay, given: _Given):
        self.replay, self.given, self.partial = replay, given, replay.partial


@patching
def _replaced(module: Any, step: _Step, *args: Any, **kwargs: Any) -> Any:
    """The forward of experts: with the ids and weights that are given."""
    step.replay.count()
    x, ids, weights, *rest = positional(args, kwargs)
    given = step.given
    assert given.weights is not None  # None are for routers alone
    given.need_rows(len(ids))
    if ids.shape != given.ids.shape:
        raise _other_k(given, ids.shape[1])
    chosen, of_them = given.ids.to(ids.dtype), given.weights.to(weights.dtype)
    if step.partial:
        chosen = torch.where(given.unknown, ids, chosen)
        of_them = torch.where(given.unknown, weights, of_them)
    return step.inner(x, chosen, of_them, *rest, **kwargs)


@patching
def _refused(module: Any, step: _Step, *args: Any, **kwargs: Any) -> Any:
    """The forward of experts that the routing has no rows of."""
    args = positional(args, kwargs)
    step.given.need_rows(len(args[1]))
    return step.inner(*args, **kwargs)


@patching
def _chosen(module: Any, step: _Step, *args: Any, **kwargs: Any) -> Any:
    """The forward of a router: topk among its experts returns those that are given."""
    step.replay.count()
    inner = step.inner
    if "topk_router" in getattr(inner, "__code__", _chosen.__code__).co_names:
        inner = type(module).forward.__get__(module)  # of fuse_routers_
    seen: list[int] = []
    with _Chooser(step.given, step.partial, seen):
        out = inner(*args, **kwargs)
    if step.given.ids.shape[1] not in seen:
        raise _other_k(step.given, *seen[-1:])
    return out


class _Chooser(TorchFunctionMode):
    """seen: gets the k of each topk among the experts."""

    def __init__(self, given: _Given, partial: bool, seen: list[int]):
        super().__init__()
        self.given, self.partial, self.seen = given, partial, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK and args[0].shape[-1] == self.given.count:
            return self._topk(func, *args, **kwargs)
        if func in _MASKED_FILL and args[0].shape[-1] == self.given.count:
            return self._masked_fill(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _topk(self, func: Any, scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        self.given.need_rows(scores.shape[:-1].numel())
        self.seen.append(k)
        if k != self.given.ids.shape[1]:  # scores of a group, perhaps
            return func(scores, k, *args, **kwargs)
        ids = self.given.ids.view(*scores.shape[:-1], k)
        if self.partial:
            own = func(scores, k, *args, **kwargs).indices
            ids = torch.where(self.given.unknown.view(ids.shape), own, ids)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _masked_fill(
        self, func: Any, scores: Tensor, mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Scores of groups that are not chosen: not of the experts that are given."""
        if not self.partial:
            return scores
        ids = self.given.ids.view(*scores.shape[:-1], -1)
        known = torch.zeros_like(mask).scatter(
            -1, ids.clamp(min=0), ~self.given.unknown.view(ids.shape)
        )
        return func(scores, mask & ~known, *args, **kwargs)


def _other_k(given: _Given, other: int = 0) -> Exception:
    k = given.ids.shape[1]
    if not other:
        return UnsupportedError(
            f"no topk among {count(given.count, 'expert')} in its router",
            expected='weights="recorded"',
            where=given.name,
        )
    return ShapeError(
        f"a routing of {count(k, 'expert')} a token",
        expected=f"{other}, as the router chooses",
        where=given.name,
    )


def _listed(experts: Mapping[str, int]) -> str:
    return some([f"{name} ({count(n, 'expert')})" for name, n in experts.items()], 2)
