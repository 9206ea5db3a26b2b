"""Parameters of G experts, as one [G, ...] or as G neighbours in one buffer, and state dicts of
both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ..definitions.tensor_lists import Input, are_neighbours
from ..errors import ShapeError
from .checks import are_alike


class GroupedParameters(nn.Module):
    """A module with a parameter for each of G groups: `name` [G, ...] if `single[name]`, otherwise
    name0 .. name{G-1}, views of one buffer.

    They stay neighbours when the module is moved, cast, copied or unpickled, and become neighbours
    when a module on the meta device gets memory, or a state dict is assigned. Any of them may be
    replaced (`register_parameter`); if they are no neighbours afterwards, each call stacks them,
    which costs time and memory for a copy.
    """

    def __init__(self, groups: int):
        super().__init__()
        self.num_groups = groups
        self.single: dict[str, bool] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._keys: dict[str, list[str]] = {}

    def add_grouped(
        self, name: str, shape: tuple[int, ...], single: bool, absent: bool = False, **factory: Any
    ) -> None:
        """Adds an uninitialized parameter [*shape] for each group, or None in its place if they are
        absent.
        """
        keys = [name] if single else [f"{name}{g}" for g in range(self.num_groups)]
        self.single[name] = single
        if absent:
            for key in keys:
                self.register_parameter(key, None)
            return
        self.shapes[name], self._keys[name] = shape, keys
        buffer = torch.empty(self.num_groups, *shape, **factory)
        for key, t in zip(keys, [buffer] if single else buffer.unbind(), strict=True):
            self.register_parameter(key, nn.Parameter(t))

    def keys(self, name: str) -> list[str]:
        """The names of the parameters."""
        return self._keys[name]

    def grouped(self, name: str) -> Input:
        """The one parameter, or those of all groups. ShapeError for one that does not fit; what
        joins them compares their dtypes and devices.
        """
        results = [getattr(self, key) for key in self._keys[name]]
        single, shape = self.single[name], self.shapes[name]
        want = (self.num_groups, *shape) if single else shape
        for key, p in zip(self._keys[name], results, strict=True):
            if p is None or p.shape != want:
                raise ShapeError(
                    f"{key} {'is None' if p is None else list(p.shape)}",
                    expected=str(list(want)),
                    where=type(self).__name__,
                )
        return results[0] if single else tuple(results)

    def each(self, name: str) -> Sequence[Tensor]:
        """The tensor [*shape] of each group."""
        parameters = self.grouped(name)
        return parameters if isinstance(parameters, tuple) else parameters.unbind()

    # ----------------------------------------------------------------------------------- one buffer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedParameters:
        names = [
            name
            for name in self.shapes
            if self._packed(name) or not all(map(_in_memory, self._parameters_of(name)))
        ]
        super()._apply(fn, recurse)
        self._pack(names)
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's. The last parameter that replaces one on the meta device brings them
        together.
        """
        old = self._parameters.get(name)
        super().register_parameter(name, param)
        if old is not None and not _in_memory(old):
            self._pack([grouped for grouped, keys in self._keys.items() if name in keys])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in self.shapes:
            parameters = list(filter(_in_memory, self._parameters_of(name)))
            if len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters):
                for p in parameters:
                    # pickle stores the whole buffer with each
                    if p.untyped_storage().nbytes() > p.nbytes and not p.is_shared():
                        p.data = p.detach().clone()
        self._pack(self.shapes)

    def _parameters_of(self, name: str) -> list[nn.Parameter]:
        """Those that are there: a reparametrized one is computed from others."""
        parameters = [self._parameters.get(key) for key in self.keys(name)]
        return [p for p in parameters if p is not None]

    def _packed(self, name: str) -> bool:
        parameters = self._parameters_of(name)
        return (
            len(parameters) == self.num_groups
            and all(map(_in_memory, parameters))
            and are_neighbours(parameters)
        )

    def _pack(self, names: Iterable[str]) -> None:
        """Moves parameters into one buffer, as neighbours, if they have one shape, dtype and
        device, and share no memory with others.
        """
        for name in names:
            parameters = self._parameters_of(name)
            alike = len({(p.shape, p.dtype, p.device) for p in parameters}) == 1
            whole = len({id(p) for p in parameters}) == self.num_groups and not self.single[name]
            movable = whole and alike and all(map(_may_move, parameters))
            if movable and not are_neighbours(parameters):
                moved = torch.stack([p.detach() for p in parameters])
                for p, t in zip(parameters, moved.unbind(), strict=True):
                    p.data = t

    # ---------------------------------------------------------------------------------- state dicts

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """As torch's, but each neighbour as a storage of its own: safetensors and accelerate take
        those of one storage for one tensor.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else self.shapes:
            if not self.single[name] and self._packed(name):
                destination.update(
                    {
                        key: from_dlpack(destination[key])
                        for key in (prefix + one for one in self.keys(name))
                    }
                )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        entries = dict(state_dict)
        entries.pop(prefix + "_extra_state", None)  # Transformer Engine's, of scales for FP8
        for name, shape in self.shapes.items():
            one, each = prefix + name, [f"{prefix}{name}{g}" for g in range(self.num_groups)]
            if self.single[name] and are_alike([entries.get(key) for key in each], len(shape)):
                entries[one] = torch.stack([entries.pop(key) for key in each])
            elif (
                not self.single[name]
                and are_alike([entries.get(one)], 1 + len(shape))
                and len(entries[one]) == self.num_groups
            ):
                entries.update(zip(each, entries.pop(one).unbind(), strict=True))
        super()._load_from_state_dict(entries, prefix, local_metadata, *args)
        if local_metadata.get("assign_to_params_buffers"):
            whole = (all(prefix + key in entries for key in keys) for keys in self._keys.values())
            self._pack([name for name, there in zip(self._keys, whole, strict=True) if there])


def _in_memory(p: Tensor) -> bool:
    """Whether a tensor has an address: not one on the meta device, a sparse one, or of a subclass
    like FakeTensor and DTensor.
    """
    return type(p.data) is Tensor and not p.is_meta and p.layout is torch.strided


def _may_move(p: Tensor) -> bool:
    """Whether a parameter may get other memory: not a part of a storage or in shared memory, where
    others see it, and not now if a tracer or a CUDA graph would see the copy.
    """
    if not _in_memory(p) or torch.compiler.is_compiling():
        return False
    shared = torch.cuda.is_current_stream_capturing() if p.is_cuda else p.is_shared()
    return p.untyped_storage().nbytes() == p.nbytes and not shared
