"""OffloadedExperts, the module: a layer whose experts are in the host's memory, some of them on a
device too. It decides which (cache.py) and calls a device: device.py says what it asks of one,
cuda.py and pretended.py are the two that there are.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the tracer

from ..errors import Error, UnsupportedError
from ..messages import amount
from ..nn import Experts, checks
from ..runtime import cuda
from . import training
from .buffers import Buffers, needed
from .cache import Cache
from .device import Counters, Device, HostStorage, decide

EVERY = 16  # steps between two changes of the cache

_modules: WeakValueDictionary[int, OffloadedExperts] = WeakValueDictionary()
_numbers = itertools.count()


class OffloadedExperts(Experts):
    """`Experts` whose parameters stay in the host's memory, the *host storage*. A device has slots
    for some experts, and computes with what is there; of the others, some are copied in each step,
    and the host computes the rest (`split`). Which experts are in slots changes with use (`cache`).

    Frozen, but adapters of them train (training.py). Moving the module moves these alone:
    parameters stay on the host, slots on their device.

    every: how many steps there are between two changes of the cache; 0: it stays as it is, unless
    `learn` is called.
    """

    device: Device
    cache: Cache
    storage: HostStorage
    every: int
    _steps: int
    _number: int
    _changing: Any  # a lock: one change of the cache at a time
    _version: int  # of the weights, but for writes that torch counts
    _shared: dict[Any, Buffers]  # by the form of layers
    _uses: Tensor  # i64[E]: how many slots named each expert,
    _new: Tensor  # and since the cache changed

    fixed = "experts on one device: those that are offloaded are not requantized or divided"

    @classmethod
    def of(
        cls,
        module: Experts,
        make: Callable[[HostStorage], Device],
        cache: Cache,
        every: int = EVERY,
        shared: dict[Any, Buffers] | None = None,
    ) -> OffloadedExperts:
        """A module with the parameters of another one, which lie on the CPU. make(storage): the
        device. shared: what the layers of a model share.
        """
        result: OffloadedExperts = cls.__new__(cls)
        result.__dict__.update(module.__dict__)
        module.order()
        result.storage = HostStorage(result)
        result.device, result.cache, result.every = make(result.storage), cache, every
        result._steps, result._changing, result._number = 0, threading.Lock(), next(_numbers)
        result._version, result._shared = 0, {} if shared is None else shared
        result.adapters_on = result.device.on
        result._uses, result._new = torch.zeros(2, result.storage.experts, dtype=torch.int64)
        _modules[result._number] = result
        result.renew()
        return result

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states [..., H], top_k_index int[T, k], top_k_weights [T, k] -> [..., H]; T tokens
        in all. adapters: as in `Experts`. With adapters, or where a gradient is wanted, all experts
        that are named are copied, and the device computes everything.
        """
        trains = torch.is_grad_enabled() and (
            hidden_states.requires_grad or top_k_weights.requires_grad
        )
        if adapters or trains or self.adapted:
            return self._train(hidden_states, top_k_index, top_k_weights, adapters)
        if torch.compiler.is_compiling():
            return torch.ops.fusion_moe.offloaded_experts(
                hidden_states, top_k_index, top_k_weights, self._number
            )
        return self.step(hidden_states, top_k_index, top_k_weights)

    @_disable_dynamo  # a graph would keep copied weights for its backward
    def _train(self, x: Tensor, ids: Tensor, w: Tensor, adapters: Any) -> Tensor:
        more = adapters or (self._lora() if self.adapted else {})
        return self.step(x, ids, w, more)

    def step(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """As `forward`. adapters: None for a step by slots and the host."""
        where = type(self).__name__
        checks.need_rows("hidden_states", hidden_states, self.storage.features, where)
        device, k = hidden_states.device.type, top_k_index.shape[-1]
        if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):  # as the operation does it
                cast = hidden_states.to(torch.get_autocast_dtype(device))
                return self.step(cast, top_k_index, top_k_weights, adapters)
        if self._in_slots != self.key:  # torch has counted writes
            self.renew()
        x, ids = hidden_states.reshape(-1, hidden_states.shape[-1]), top_k_index.reshape(-1, k)
        args = x, ids, top_k_weights.reshape(-1, k)
        try:
            if adapters is not None:
                return training.run(self, *args, adapters).view(hidden_states.shape)
            y = self.device.step(*args)
        except Error as error:  # whose message has the operation's argument names
            raise error.at(
                f"{where}, whose hidden_states, top_k_index and top_k_weights are x, ids and w"
            ) from None
        self._steps += 1
        captured = x.is_cuda and cuda.capturing()
        if self.every and self._steps % self.every == 0 and not captured:
            self.learn()
        return y.view(hidden_states.shape)

    @property
    def key(self) -> tuple[int, int]:
        """The module's number, and the version of its weights: how often they were renewed, and
        how often torch has counted writes to them.
        """
        counts = (0 if t.is_inference() else t._version for t in self.storage.tensors.values())
        return self._number, self._version + sum(counts)

    @property
    def layer_buffers(self) -> Buffers:
        """Those that it shares with layers like it."""
        form = tuple((t.shape, t.dtype) for t in self.storage.tensors.values())
        if form not in self._shared:
            try:
                self._shared[form] = Buffers(self)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"no room for the buffers of offloaded experts, {amount(needed(self), 'B')}: "
                    "offload with less max_memory (fusion-moe plan --train says how much), or with "
                    f"gradient checkpointing. {error}"
                ) from None
        return self._shared[form]

    def arguments(
        self, x: Tensor, ids: Tensor, w: Tensor, weights: Mapping[str, Tensor], more: Any
    ) -> dict[str, Any]:
        """Those of the operation with weights that are on the device."""
        layout = {"weight_layout": self.device.layout} if self.device.layout else {}
        return self.storage.arguments(x, ids, w, weights, **layout, **more)

    def unchanging(self) -> Any:
        """A context in which the cache does not change."""
        return self._changing

    def learn(self) -> int:
        """Changes which experts are in slots, by their uses since the last call. Returns how many
        were copied.
        """
        with self._changing:
            self._take_uses()
            moves = self.cache.learn(self._new)
            self._new.zero_()
            for move in moves:
                self.device.load(move.slot, move.expert)
            if moves:
                self.device.publish(self.cache.expert_map)
        return len(moves)

    def _take_uses(self) -> None:
        uses = self.device.uses().cpu()
        self._new += uses
        self._uses += uses

    def uses(self) -> Tensor:
        """i64[E]: how many slots named each expert so far; waits for the device."""
        with self._changing:
            for _ in "ab":  # a GPU's numbers are as of when they were last asked for
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self._take_uses()
            return self._uses.clone()

    def renew(self) -> None:
        """Copies all experts in slots again, after their storage has changed."""
        self._version += 1
        for expert, slot in enumerate(self.cache.expert_map.tolist()):
            if slot >= 0:
                self.device.load(slot, expert)
        self.device.publish(self.cache.expert_map)
        self._in_slots = self.key

    def explain(self, x: Tensor, ids: Tensor, w: Tensor) -> tuple[str, str]:
        """What a call with these arguments does, and the program of its steps."""
        x, ids, w = (t.reshape(-1, t.shape[-1]) for t in (x, ids, w))
        device, expert_map = self.device, self.device.expert_map.cpu()
        decided, uses = decide(ids.cpu(), expert_map, device.constants, device.spare, device.limit)
        here = f"{int(uses[expert_map >= 0].sum())} of {int(uses.sum())} slots' experts are there"
        of = "; with times of another machine, since experts in files are not measured"
        return f"{here}; {decided}{of if device.storage.in_files else ''}", str(
            device.steps(x, ids, w)
        )

    @property
    def counters(self) -> Counters:
        """What the steps of the module have done so far."""
        return self.device.counters

    def put_in(self, layout: str) -> str:
        """As in `PackedModule`; on the host, weights stay as the host's kernels read them."""
        return ""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OffloadedExperts:
        for child in self.children():
            child._apply(fn)
        return self  # nothing else moves, and nothing is cast

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        # parameters stay where devices read them, also if others are to be assigned
        copied = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, copied, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"a copy of {type(self).__name__}, or a file of one",
            expected="its state_dict(), or save_pretrained(directory) of its model",
        )

    def extra_repr(self) -> str:
        """For print(model)."""
        slots = int((self.cache.expert_map >= 0).sum())
        return f"{super().extra_repr()}, on the device={slots}"


def _offloaded_experts(x: Tensor, ids: Tensor, w: Tensor, module: int) -> Tensor:
    entry = _modules.get(module)
    if entry is None:
        raise UnsupportedError(
            "experts that were deleted",
            expected="the model whose graph this is",
            todo="keep the model while what was compiled of it is used",
            where="offloaded_experts",
        )
    return entry.step(x, ids, w)


_LIBRARY = torch.library.Library("fusion_moe", "FRAGMENT")
_LIBRARY.define(
    "offloaded_experts(Tensor x, Tensor ids, Tensor w, int module) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_LIBRARY.impl("offloaded_experts", _offloaded_experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fusion_moe::offloaded_experts", lambda x, ids, w, module: torch.empty_like(x), lib=_LIBRARY
)
