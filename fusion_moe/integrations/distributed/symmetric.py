"""dispatch="symmetric": the ranks of a node write tokens, and sums for them, into each other's
memory, as operations of the programs that compute the experts and their gradients
(exchange/).

    memory = GroupMemory.of_group(group, device)        # checks; UnsupportedError says why not
    layer = memory.layer(experts, features)             # on all ranks, in the same order
    layer.arguments()                                   # of `fused_experts`

Memory is allocated by the first call that needs it, and grows with later ones: on all ranks at
once, since all call with as many tokens, or with the most that any rank may have.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import OptionError, ShapeError, UnsupportedError
from ...layouts import ceil_to
from ...messages import MUCH, amount, phase, warn_once
from ...nn import Experts
from ...runtime import cuda
from ...runtime.turns import Turns
from .dispatch import Dispatcher, divide_forward
from .exchange import peers
from .exchange.kinds import MOST_SLOTS, PEERS

_CHUNKS, _PIECES, _MOST_RANKS, _TILE = 256, 16, 64, 256
_LESS = "a lower capacity, or fewer tokens in a call (vLLM: --max-num-batched-tokens)"
Place = tuple[str, str, Any]
# torch makes multicast objects at rendezvous, and NCCL for its communicators, unless these say no
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


def region_bytes(ranks: int, tokens: int, row: int) -> int:
    """The bytes of shared memory that each rank needs to exchange up to `tokens` tokens of each of
    `ranks` ranks, forward and backward; row: bytes of one token's activations. The layout is that
    of exchange/kernels/exchange.h (GPUs leave its flags unused).
    """
    flags = 8 * _PIECES, 8 * _CHUNKS, 8 * _CHUNKS
    ids = weights = 4 * MOST_SLOTS * tokens
    twice = 128, ids, weights, row * tokens
    return 256 + sum(ceil_to(n * ranks, 256) for n in (*flags, *twice, *twice))


class GroupMemory:
    """The memory of a group's ranks, which its layers use in turn. tokens, row: for how many tokens
    of a rank, and bytes of each, there is room.
    """

    _of_groups: dict[str, GroupMemory] = {}  # noqa: RUF012

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        """UnsupportedError, on all ranks, if they cannot share memory."""
        self.group, self.device = group, device
        self.rank, self.ranks = group.rank(), group.size()
        self.tokens = self.row = 0
        self.turns, self._layers, self._addresses = Turns(device), list[Layer](), list[int]()
        self._memory: Any = None
        places = self._of_all(_place(device))
        self._need_all(_why_not_shared(places, self.rank))
        self._need_all(self._why_not_allocated())

    def _need_all(self, why: str) -> None:
        """UnsupportedError on all ranks if any has a reason."""
        if match := next(filter(None, self._of_all(why)), ""):
            raise UnsupportedError(
                match, expected=f"at most {_MOST_RANKS} ranks of one node, which share memory"
            )

    def _why_not_allocated(self) -> str:
        """Why a little memory cannot be shared, which nobody knows before; "" if it can."""
        try:
            self._share(region_bytes(self.ranks, 1, 256))
        except (RuntimeError, OSError, OptionError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return ""

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, device: torch.device) -> GroupMemory:
        """The one of a group, for all its layers."""
        entry = cls._of_groups.get(group.group_name)
        if entry is None or entry.group is not group:
            entry = cls._of_groups[group.group_name] = cls(group, device)
        return entry

    def layer(self, experts: int, features: int) -> Layer:
        """One more layer. experts: of all ranks. OptionError unless all ranks have the same layers,
        in the same order.
        """
        layer = Layer(self, len(self._layers), experts, features)
        self._need_agreement((self.tokens, self.row), layer)
        self._layers.append(layer)
        self._tell([layer])
        return layer

    def allocate(self, tokens: int) -> None:
        """Memory for so many tokens of each rank, before the first call: in bf16, or float32 on
        CPUs.
        """
        for layer in self._layers:
            layer.need(tokens, 2 if self.device.type == "cuda" else 4)

    def take_turn(self, *_: Any) -> None:
        """A hook of autograd's, before a call's backward."""
        with self.turns.next():
            pass

    def need(self, tokens: int, row: int) -> None:
        """Makes room, on all ranks, if there is too little. OptionError if ranks disagree."""
        if tokens <= self.tokens and row <= self.row:
            return
        if self.device.type == "cuda" and cuda.capturing():
            raise UnsupportedError(
                f"{tokens} tokens in a CUDA graph, and memory for {self.tokens}",
                expected="as many in a call before the capture",
                todo=f"parallelize_(..., capacity={tokens}) allocates it at once",
                where="dispatch='symmetric'",
            )
        room = max(tokens, self.tokens), max(row, self.row)
        self._need_agreement(room)
        self._allocate(*room)

    def _need_agreement(self, room: tuple[int, int], *more: Layer) -> None:
        layers = [(layer.experts, layer.features) for layer in (*self._layers, *more)]
        _need_agreement(self._of_all((room, layers)))

    def _allocate(self, tokens: int, row: int) -> None:
        nbytes = region_bytes(self.ranks, tokens, row)
        text = (
            f"{amount(nbytes, 'B')} on each of {self.ranks} ranks for {tokens:,} tokens of "
            f"{row:,} bytes, shared by {len(self._layers)} layers"
        )
        if nbytes >= MUCH and self.rank == 0:
            phase(f"dispatch='symmetric' allocates {text}")
        if self.device.type == "cuda":
            free = min(self._of_all(torch.cuda.mem_get_info(self.device)[0]))
            self._need_free(nbytes, free, text)
        self._wait()  # for calls that use what there is
        self.tokens = self.row = 0
        self._tell(self._layers)  # if the next line raises, no call may find what was freed
        self._memory = None
        self._memory, addresses = self._share(nbytes)
        limit = _timeout(self.group, self.device)
        self._memory[0][:24].view(torch.int64).copy_(torch.tensor([0, limit, 0]))
        self._wait()  # nobody sends before all have this
        self.tokens, self.row, self._addresses = tokens, row, addresses
        self._tell(self._layers)

    def _tell(self, layers: Sequence[Layer]) -> None:
        """Where memory is; backwards that have saved this see it, too."""
        if self._addresses:
            for layer in layers:
                numbers = [self.rank, layer.number, self.tokens, self.row, *self._addresses]
                peers.tell(layer.peers, numbers)

    def _need_free(self, nbytes: int, free: int, need: str) -> None:
        """OptionError unless as much is free, on all ranks."""
        if nbytes > free:
            raise OptionError(
                f"{amount(free, 'B')} of free memory",
                expected=need,
                todo=_LESS,
                where="dispatch='symmetric'",
            )

    def _share(self, nbytes: int) -> tuple[Any, list[int]]:
        """This rank's memory and what keeps it, and where this process finds that of each. It is
        zeros, on GPUs words that did not come.
        """
        return self._on_gpus(nbytes) if self.device.type == "cuda" else self._in_a_file(nbytes)

    def _wait(self) -> None:
        """For kernels, and for all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._of_all(None)

    def _in_a_file(self, nbytes: int) -> tuple[Any, list[int]]:
        """Of processes on CPUs: one file that all map, without a name when they have it."""
        nbytes = ceil_to(nbytes, 4096)
        name, why = _file_of(nbytes * self.ranks) if self.rank == 0 else ("", "")
        name, why = self._of_all((name, why))[0]
        if why:
            raise OptionError(
                f"no {amount(nbytes * self.ranks, 'B')} of memory that processes share: {why}",
                expected=f"as much for {self.ranks} ranks, in /dev/shm where it exists",
                todo=f"a larger /dev/shm (containers: --shm-size), or {_LESS}",
                where="dispatch='symmetric'",
            )
        whole = torch.from_file(name, shared=True, size=nbytes * self.ranks, dtype=torch.uint8)
        self._wait()
        if self.rank == 0:
            with suppress(OSError):
                Path(name).unlink()
        addresses = [whole.data_ptr() + nbytes * rank for rank in range(self.ranks)]
        return (whole[nbytes * self.rank :][:nbytes], whole), addresses

    def _on_gpus(self, nbytes: int) -> tuple[Any, list[int]]:
        """torch's symmetric memory, without multicast."""
        import torch.distributed._symmetric_memory as symmetric

        _forbid_multicast()
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        own.fill_(255)  # nothing came: kernels/exchange.cuh
        torch.cuda.synchronize(self.device)
        handle = symmetric.rendezvous(own, self.group)
        return (own, handle), [int(pointer) for pointer in handle.buffer_ptrs]

    def _of_all(self, x: Any) -> list[Any]:
        results: list[Any] = [None] * self.ranks
        dist.all_gather_object(results, x, self.group)
        return results


class Layer:
    """A layer that uses the memory of a group. peers i64[4 + R]: what stands for that in calls
    (exchange/peers.py), until the layer is freed. capacity: the most tokens of any rank, 0 if all
    have equally many. float32_sums: whether ranks' sums are added before they are rounded.
    """

    def __init__(self, memory: GroupMemory, number: int, experts: int, features: int):
        self.memory, self.number, self.experts = memory, number, experts
        self.features, group = features, memory.group.group_name
        self.peers = peers.issue(PEERS + memory.ranks, group, memory.device)
        weakref.finalize(self, peers.revoke, self.peers.data_ptr()).atexit = False
        self.capacity, self.float32_sums = 0, False

    def __deepcopy__(self, memo: Any) -> Layer:
        """Itself: copies of a module share it."""
        return self

    def need(self, tokens: int, itemsize: int) -> None:
        """Memory for so many tokens of each rank; kernels may pad their features."""
        widest = max(itemsize, 4 if self.float32_sums else 0)
        self.memory.need(tokens, ceil_to(self.features, _TILE) * widest)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `fused_experts` that say where the ranks' memory is."""
        return {
            "peers": self.peers,
            "across": self.memory.group.group_name,
            "of_experts": self.experts,
            "capacity": self.capacity,
            "float32_sums": self.float32_sums,
        }


def send_tokens(module: nn.Module, layer: Layer, otherwise: Dispatcher) -> None:
    """Wraps the forward of experts that are one operation, whose calls send tokens themselves.
    Tokens with adapters of their own go through a dispatcher of collectives.
    """
    inner = module.forward.__func__  # type: ignore[attr-defined]
    divide_forward(module, otherwise, layer.features)
    by_collectives = module.forward.__func__  # type: ignore[attr-defined]
    most, takes_arguments = layer.capacity, isinstance(module, Experts)
    if not takes_arguments:
        module.exchanged = layer  # type: ignore[assignment]

    @functools.wraps(inner)
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        inputs: tuple[Any, ...] = (hidden_states, top_k_index, top_k_weights)
        if adapters and "lora_of" in adapters:
            if not torch.compiler.is_compiling():
                say_collectives("tokens have adapters of their own")
            return by_collectives(self, *inputs, adapters)
        if takes_arguments:
            inputs = *inputs, {**(adapters or {}), **layer.arguments()}
        if torch.compiler.is_compiling():
            return inner(self, *inputs)
        with layer.memory.turns.next():
            tokens = math.prod(hidden_states.shape[:-1])
            if most and tokens > most:
                raise ShapeError(
                    f"{tokens} tokens",
                    expected=f"at most {most}, the capacity",
                    todo="call with fewer, or parallelize_ with a larger capacity",
                    where="dispatch='symmetric'",
                )
            computed = hidden_states if takes_arguments else next(self.parameters())
            layer.need(most or max(tokens, 1), computed.element_size())
            y = inner(self, *inputs)
        if y.is_cuda and y.grad_fn is not None:
            y.grad_fn.register_prehook(layer.memory.take_turn)
        return y

    module.forward = MethodType(forward, module)


def say_collectives(why: str) -> None:
    """Says once why dispatch="symmetric" goes through collectives."""
    warn_once(f"dispatch='symmetric' goes through collectives: {why}")


def _file_of(nbytes: int) -> tuple[str, str]:
    """A new file of memory, and why there is none: a process ends that writes to what a file system
    has no room for.
    """
    shm = Path("/dev/shm")
    handle, name = tempfile.mkstemp("", "fusion_moe_", shm if shm.is_dir() else None)
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        Path(name).unlink()
        return "", str(error)
    finally:
        os.close(handle)
    return name, ""


# Checks -------------------------------------------------------------------------------------------


def _place(device: torch.device) -> Place:
    """Where a rank is: its node, since when that runs, its GPU."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    since = boot.read_text() if boot.exists() else ""
    gpu = cuda.index_of(device) if device.type == "cuda" else None
    return platform.node(), since, gpu


def _why_not_shared(places: Sequence[Place], rank: int) -> str:
    """Why a rank cannot reach the memory of all; "" if it can."""
    nodes, own = {place[:2] for place in places}, places[rank][2]
    if len(nodes) > 1:
        return f"ranks of {len(nodes)} nodes"
    if len(places) > _MOST_RANKS:
        return f"{len(places)} ranks"
    for *_, gpu in places if own is not None else ():
        # where each process sees only its own GPU, rendezvous finds out
        seen = gpu != own and gpu < torch.cuda.device_count()
        if seen and not torch.cuda.can_device_access_peer(own, gpu):
            return f"GPU {own} has no peer access to GPU {gpu}"
    return ""


def _need_agreement(entries: list[Any]) -> None:
    for rank, (text, mine) in enumerate((x, entries[0]) for x in entries):
        if text != mine:
            (tokens, row), layers = text
            (tokens_0, row_0), layers_0 = mine
            raise OptionError(
                f"rank {rank} has {_layers(layers)} and calls with {tokens} tokens of {row} bytes, "
                f"rank 0 {_layers(layers_0)} with {tokens_0} of {row_0}",
                expected="the same on all ranks",
                todo="parallelize_ the same model on each; capacity=N lets numbers of tokens "
                "differ up to N",
                where="dispatch='symmetric'",
            )


def _layers(layers: list[tuple[int, int]]) -> str:
    each = ", ".join(f"{e} experts of {h} features" for e, h in dict.fromkeys(layers))
    return f"{len(layers)} layers ({each})"


def _forbid_multicast() -> None:
    for name, value in NO_MULTICAST.items():
        if (entry := os.environ.setdefault(name, value)) != value:
            raise OptionError(
                f"{name}={entry}",
                expected=f"{value}: the exchange works without multicast",
                todo="unset it before processes start",
                where="dispatch='symmetric'",
            )


def _timeout(group: dist.ProcessGroup, device: torch.device) -> int:
    """Nanoseconds that ranks of a group wait for each other."""
    backend: Any = group._get_backend(device)
    return int(backend.options._timeout.total_seconds() * 1e9)
