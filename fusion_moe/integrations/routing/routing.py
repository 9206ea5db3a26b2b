"""The experts of tokens, indexed by tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import DtypeError, GroupsError, ShapeError, UnsupportedError
from ...messages import count
from .layers import layers_of

Rows = tuple[Tensor, Tensor | None]  # ids int[rows, k], weights float[rows, k]


class Routing:
    """Which experts tokens went to, in each layer of a model, and with which weights.

    A row is a token. An id of -1 means that nothing is known of its row: a replay leaves the
    row's experts to the router.

    Attributes:
        experts: how many there are to choose from, by the name of a layer's module, in the order of
            the model's modules.
        calls: what each layer was called with, by the same names: ids int[rows, k], weights
            float[rows, k] or None.
        partial: whether there may be rows of -1.
    """

    def __init__(
        self,
        experts: Mapping[str, int],
        calls: Mapping[str, Sequence[Rows]] | None = None,
        partial: bool = False,
    ):
        self.experts, self.partial = dict(experts), partial
        self.calls: dict[str, list[Rows]] = {
            name: list(calls[name]) if calls else [] for name in experts
        }

    @classmethod
    def from_vllm(cls, routed_experts: Any, model: nn.Module) -> Routing:
        """What vLLM says of a request with `enable_return_routed_experts`: `routed_experts` of a
        `CompletionOutput`, integers [tokens, layers, k] for all layers of the model, in numpy or
        torch, -> their rows for the layers of `model` that have experts, int16 or int32, without
        weights. The last token of a completion was never computed, and has none.

        Raises:
            ShapeError: for another number of dimensions, or a layer that is not there.
            DtypeError: for numbers that are not integers.
            GroupsError: for an expert that the model does not have.
        """
        ids = torch.as_tensor(routed_experts)
        if ids.dim() != 3:
            raise ShapeError(f"ids {list(ids.shape)}", expected="[tokens, layers, k]")
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise DtypeError(f"ids in {ids.dtype}", expected="integers")
        layers = {layer.name: layer.count for layer in layers_of(model)}
        dtype = torch.int16 if max(layers.values()) <= 2**15 else torch.int32
        ids, calls, partial = ids.to(torch.int64), {}, False
        for name, experts in layers.items():
            number = _number_of(name)
            if number >= ids.shape[1]:
                raise ShapeError(
                    f"ids of {count(ids.shape[1], 'layer')}",
                    expected="those of all layers",
                    where=name,
                )
            low, high = map(int, ids[:, number].aminmax()) if len(ids) else (0, 0)
            if low < -1 or high >= experts:
                raise GroupsError(
                    f"expert {low if low < -1 else high}",
                    expected=f"0 to {experts - 1}, or -1 for a token of which nothing is known",
                    where=name,
                )
            partial |= low < 0
            calls[name] = [(ids[:, number].to(dtype), None)]
        return cls(layers, calls, partial)

    @property
    def called(self) -> list[str]:
        """The layers that have rows: not those of a tower for images that saw none."""
        return [name for name, calls in self.calls.items() if calls]

    def rows(self, name: str) -> Rows:
        """The ids int[rows, k] of a layer that was called, and weights float[rows, k], or None.

        Raises:
            ShapeError: for calls of other shapes, or with several k.
            DtypeError: for ids that are no integers.
        """
        for call in self.calls[name]:
            _check_call(name, *call, self.calls[name][0][0].shape[-1])
        ids, weights = zip(*self.calls[name], strict=True)
        return torch.cat(ids), None if weights[0] is None else torch.cat(weights)

    def __len__(self) -> int:
        """The number of tokens. ShapeError if it is not the same in all layers that were called."""
        lengths = {name: sum(len(ids) for ids, _ in self.calls[name]) for name in self.called}
        first, *others = lengths or {"": 0}
        for name in others:
            if lengths[name] != lengths[first]:
                raise ShapeError(
                    f"{lengths[first]} rows of {first}, {lengths[name]} of {name}",
                    expected="as many tokens in all layers",
                    todo="record the part of the model that has them: its language model",
                )
        return lengths.get(first, 0)

    def __repr__(self) -> str:
        return f"<Routing of {count(len(self), 'token')}, {count(len(self.experts), 'layer')}>"

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Routing:
        """A copy of some rows: a slice, or integers or a mask [len(self)]."""
        if not isinstance(rows, slice):
            rows = torch.as_tensor(rows)
            if rows.dim() != 1:
                raise ShapeError(f"rows {list(rows.shape)}", expected="one dimension, or a slice")
            if rows.dtype == torch.bool and len(rows) != len(self):
                raise ShapeError(f"a mask of {len(rows)} rows", expected=f"{len(self)}")

        def chosen(t: Tensor) -> Tensor:
            return t[rows].clone() if isinstance(rows, slice) else t[rows.to(t.device)]

        return self._with(chosen)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Routing:
        made = Routing(self.experts, partial=self.partial)
        for name in self.called:
            ids, weights = self.rows(name)
            made.calls[name] = [(change(ids), None if weights is None else change(weights))]
        return made

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Routing:
        """A copy elsewhere, ids in another dtype: `to("cpu", torch.int8)` takes a byte an id.

        Raises:
            DtypeError: for a dtype that cannot have all ids and -1.
        """
        most = max(self.experts.values()) - 1
        if dtype is not None and not (
            not dtype.is_floating_point and dtype.is_signed and torch.iinfo(dtype).max >= most
        ):
            raise DtypeError(f"ids to {most} in {dtype}", expected="torch.int16, or wider")

        def moved(t: Tensor) -> Tensor:
            return t.to(device, t.dtype if t.is_floating_point() else dtype, copy=True)

        return self._with(moved)

    def sequences(self, batch: int) -> list[Routing]:
        """What was recorded of calls that all have the same `batch` sequences, as `generate` makes
        them: the rows of each sequence, in the order of its tokens, with those of its padding.

        Raises:
            ShapeError: for a call whose rows cannot be divided by `batch`.
        """
        made = [Routing(self.experts, partial=self.partial) for _ in range(batch)]
        for name, calls in self.calls.items():
            for ids, weights in calls:
                if len(ids) % batch:
                    raise ShapeError(
                        f"a call with {count(len(ids), 'row')}",
                        expected=f"{batch} sequences, as many rows each",
                        where=name,
                    )
                for i, each in enumerate(ids.chunk(batch)):
                    w = None if weights is None else weights.chunk(batch)[i]
                    made[i].calls[name].append((each, w))
        return made

    @staticmethod
    def concat(parts: Iterable[Routing]) -> Routing:
        """The rows of some, one after the other.

        Raises:
            ShapeError: for routings of other layers or experts, or of which some have no weights.
        """
        first, *others = parts = list(parts)
        for other in others:
            if other.experts != first.experts:
                raise ShapeError(f"{other.experts}", expected=f"{first.experts}, as the first has")
        weighted = {w is not None for p in parts for calls in p.calls.values() for _, w in calls}
        if len(weighted) > 1:
            raise ShapeError(
                "routings with weights, and without", expected="weights in all of them"
            )
        calls = {name: [call for p in parts for call in p.calls[name]] for name in first.experts}
        return Routing(first.experts, calls, any(p.partial for p in parts))

    @staticmethod
    def packed(sequences: Sequence[Routing], lengths: Sequence[int]) -> Routing:
        """One row for each token of sequences that are packed one after the other.

        Args:
            sequences: the rows of each. The last token of a rollout is never computed: it may have
                none, and a replay leaves its experts to the router.
            lengths: tokens of each.

        Raises:
            ShapeError: for a sequence with other rows, by its number.
        """
        if len(sequences) != len(lengths):
            raise ShapeError(f"{len(sequences)} sequences", expected=f"{len(lengths)}")
        parts, unknown = list[Routing](), False
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            missing = int(length) - len(sequence)
            if missing not in (0, 1) or (missing and not sequence.called):
                raise ShapeError(
                    f"{count(len(sequence), 'row')} of routing for {count(int(length), 'token')}",
                    expected=f"{length}, or one less: the last token is never computed",
                    where=f"sequence {i}",
                )
            parts.append(sequence._with(lambda t, n=missing: _padded(t, n)))  # type: ignore[misc]
            unknown |= bool(missing)
        made = Routing.concat(parts)
        made.partial |= unknown
        return made

    @staticmethod
    def padded(sequences: Sequence[Routing], mask: Tensor) -> Routing:
        """One row for each position of a padded batch; padding is left to the router.

        Args:
            sequences: as in `packed`; their rows belong to the positions of a row of the mask that
                are not 0, in their order.
            mask: bool or int[batch, length], as transformers' attention_mask.

        Raises:
            ShapeError: for a sequence with other rows, by its number.
        """
        there = mask.bool().flatten()
        tokens = Routing.packed(sequences, mask.bool().sum(1).tolist())

        def spread(t: Tensor) -> Tensor:
            return _unknown(t, len(there)).index_put_((there.to(t.device),), t)

        made = tokens._with(spread)
        made.partial |= not bool(there.all())
        return made


_INTEGERS = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64


def _check_call(name: str, ids: Tensor, weights: Tensor | None, k: int) -> None:
    if ids.dim() != 2 or ids.shape[1] != k or (weights is not None and weights.shape != ids.shape):
        of = "" if weights is None else f", weights {list(weights.shape)}"
        raise ShapeError(
            f"ids {list(ids.shape)}{of}",
            expected=f"both [rows, k], with one k for all calls, {k}",
            where=name,
        )
    if ids.dtype not in _INTEGERS:
        raise DtypeError(f"ids in {ids.dtype}", expected="integers", where=name)


def _unknown(like: Tensor, rows: int) -> Tensor:
    """[rows, k] of -1, as ids, or of 0, as weights."""
    return like.new_full((rows, like.shape[1]), 0 if like.is_floating_point() else -1)


def _padded(t: Tensor, rows: int) -> Tensor:
    return torch.cat([t, _unknown(t, rows)]) if rows else t


def _number_of(name: str) -> int:
    """ "model.layers.3.mlp.experts" -> 3"""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if not numbers:
        raise UnsupportedError(
            "a layer without a number",
            expected="a name such as model.layers.3.mlp.experts",
            where=name,
        )
    return int(numbers[0])
