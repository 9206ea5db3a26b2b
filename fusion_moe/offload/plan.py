"""What fits where: experts of a model in a device's memory and in the host's, before anything is
loaded or moved.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from ..checkpoints import Directory, all_eight_bits, number, predicts_further_tokens, weights_in
from ..errors import OptionError, UnsupportedError
from ..messages import amount, count
from ..nn import Experts
from ..runtime.host_memory import pages
from .machine import Machine
from .split import split

KV_TOKENS = 8192  # whose keys and values are left room, if nobody says how many
WORKSPACE = 2**30  # of a GPU: its context, activations, what kernels need
DISK = 3e9  # bytes per second that a disk is read with, of NVMe: assumed
LAUNCHES = 20e-6  # seconds of a layer of small weights: about ten kernels in a CUDA graph
_EXPERTS = re.compile(r"^(.*\bexperts)\b(?:\.(\d+)\.)?")  # not shared_experts
SLOTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k")
INNER = ("moe_intermediate_size", "intermediate_size")
_MARGIN = 4 * pages.PAGE  # of the files of a layer


@dataclass(frozen=True)
class Layer:
    """The experts of a layer: how many, bytes of one, multiplications of a row by one, experts of a
    token.
    """

    name: str
    experts: int
    nbytes: int
    macs: int
    slots: int

    @property
    def whole(self) -> int:
        """The bytes of all experts of the layer."""
        return self.experts * self.nbytes


@dataclass(frozen=True)
class Model:
    """Bytes of a model's parts. rest: of all but routed experts; kv: of a token's keys and values;
    rounded: whether experts are rounded to NVFP4 while they are read.
    """

    layers: tuple[Layer, ...]
    rest: int
    kv: int
    rounded: bool = False

    @property
    def experts(self) -> int:
        """The bytes of all experts of the model."""
        return sum(layer.whole for layer in self.layers)

    @classmethod
    def of_directory(cls, directory: Directory, rounds: bool = False) -> Model:
        """By the headers of a directory's files, without what predicts further tokens, which is
        not loaded. rounds: whether experts in floats are rounded to NVFP4 while they are read;
        otherwise UnsupportedError. So for one without experts.
        """
        config, counts = directory.config, defaultdict[str, int](int)
        sizes, rest, dtypes = defaultdict[str, int](int), 0, set[torch.dtype]()
        numbers = defaultdict[str, int](int)
        of_eight_bits = _of_eight_bits(directory)
        for name, entry in directory.tensors.items():
            if predicts_further_tokens(name, config):
                continue
            nbytes = of_eight_bits.get(name, entry.nbytes)
            if match := _EXPERTS.match(name):
                of_layer = int(match[2]) + 1 if match[2] else (*entry.shape, 0)[0]
                counts[match[1]] = max(counts[match[1]], of_layer)
                sizes[match[1]] += nbytes
                numbers[match[1]] += prod(entry.shape)
                dtypes.add(entry.dtype)
            else:
                rest += nbytes
        if not sizes or not all(counts.values()):
            raise _no_experts(str(directory.path))
        in_floats = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes)
        if in_floats and not rounds:
            raise UnsupportedError(
                "experts in floats",
                expected="experts in few bits, which the host's kernels read",
                todo="fusion-moe quantize SRC DST rounds those of a directory; "
                "from_pretrained(..., quantization_config=NVFP4Config()) while it reads them",
                where=str(directory.path),
            )
        layers = []
        for name, nbytes in sizes.items():
            # codes of half a byte, and a byte for sixteen of them
            nbytes = numbers[name] * 9 // 16 if in_floats else nbytes
            hidden, inner = (number(config, name, keys) or 0 for keys in (("hidden_size",), INNER))
            each, slots = nbytes // counts[name], number(config, name, SLOTS) or 1
            layers.append(Layer(name, counts[name], each, 3 * hidden * inner, slots))
        return cls(tuple(layers), rest, _kv(config), in_floats)

    @classmethod
    def of_module(cls, model: nn.Module, experts: Mapping[str, Experts]) -> Model:
        """Of a loaded model, whose experts are these."""
        config: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
        inside = {id(p) for module in experts.values() for p in module.parameters()}
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        rest = sum(t.nbytes for key, t in tensors.items() if key not in inside)
        layers = []
        for name, module in experts.items():
            slots = number(config, name, SLOTS) or 1
            shapes = [module.shape_of(projection) for projection in module.projections]
            count, macs = shapes[0][0], sum(n * k for _, n, k in shapes)
            layers.append(Layer(name, count, -(-module.nbytes // count), macs, slots))
        return cls(tuple(layers), rest, _kv(config))


@dataclass(frozen=True)
class Plan:
    """Where a model's parts are. slots: of each layer on the device; spare of them are for experts
    that a step copies, turning for those that the cache copies between steps. kv_tokens: for whose
    keys and values there is room. device_memory, ram: what may be used; None: not limited.
    in_files: how many layers, the last ones, have their experts in files, since `ram` is too small.
    """

    model: Model
    slots: tuple[int, ...]
    spare: int
    turning: int
    kv_tokens: int
    device_memory: int
    ram: int | None
    in_files: int = 0

    @property
    def in_memory(self) -> tuple[Layer, ...]:
        """The layers whose experts are in the host's memory."""
        return self.model.layers[: len(self.model.layers) - self.in_files]

    @property
    def filed(self) -> int:
        """The bytes of experts in files."""
        return self.model.experts - sum(layer.whole for layer in self.in_memory)

    @property
    def whole(self) -> bool:
        """Whether all experts are on the device, so that nothing is offloaded."""
        return all(
            n >= layer.experts for n, layer in zip(self.slots, self.model.layers, strict=True)
        )

    @property
    def resident(self) -> float:
        """The share of experts that the device holds between steps."""
        experts = sum(layer.experts for layer in self.model.layers)
        return sum(self.kept(i) for i, _ in enumerate(self.slots)) / experts

    def kept(self, i: int) -> int:
        """How many experts of a layer the device holds between steps."""
        experts = self.model.layers[i].experts
        return (
            experts
            if self.whole
            else max(0, min(experts, self.slots[i] - self.spare - self.turning))
        )

    def seconds(self, machine: Machine) -> float:
        """Those of a token of one sequence, if all experts are used equally often: the cache then
        learns nothing. No layer takes less than its kernels take to begin. What is in files is read
        from a disk at each miss.
        """
        total = self.model.rest / machine.gpu
        for i, layer in enumerate(self.model.layers):
            hits = layer.slots * self.kept(i) / layer.experts
            misses = layer.slots - hits
            constants = machine.constants(layer.nbytes, layer.macs)
            whole, in_memory = int(misses), i < len(self.in_memory)
            few, more = (
                split(
                    dict.fromkeys(range(n), 1),
                    constants,
                    self.spare,
                    None if in_memory else 0,
                    int(hits),
                ).time
                for n in (whole, whole + 1)
            )
            missed = (few + (misses - whole) * (more - few)) / 1e9
            if not in_memory:
                missed = max(missed, misses * layer.nbytes / DISK)
            total += max(hits * layer.nbytes / machine.gpu, missed)
        return max(total, len(self.model.layers) * LAUNCHES)

    def __str__(self) -> str:
        m, held = self.model, self.model.experts - self.filed
        slots = "all" if self.whole else f"{min(self.slots)} slots a layer"
        rows = [
            f"on the device, of {_limit(self.device_memory)}:",
            f"  all but experts  {amount(m.rest, 'B')}",
            f"  keys and values  {amount(m.kv * self.kv_tokens, 'B')}, {self.kv_tokens:,} tokens",
            f"  experts          {amount(self.in_slots, 'B')}, {slots}: {self.resident:.0%} of "
            f"them stay between steps",
            f"in memory: {amount(held, 'B')} of experts in {count(len(self.in_memory), 'layer')}"
            + (f", of {_limit(self.ram)}" if self.ram is not None else ""),
            f"in files: {amount(self.filed, 'B')} of experts in "
            f"{count(self.in_files, 'layer')}, which the CPU computes",
        ]
        return "\n".join(rows[:4] if self.whole else rows if self.in_files else rows[:5])

    @property
    def in_slots(self) -> int:
        """The bytes of all slots."""
        layers = zip(self.slots, self.model.layers, strict=True)
        return sum(n * layer.nbytes for n, layer in layers)


def make(
    model: Model,
    device_memory: int,
    ram: int | None = None,
    *,
    disk: int | None = None,
    kv_tokens: int = KV_TOKENS,
    workspace: int = WORKSPACE,
    experts_device: str = "auto",
    where: str = "offload_",
) -> Plan:
    """The plan for so many bytes. OptionError for too little memory, which says how much is needed.

    disk: bytes of a folder for experts that `ram` is too small for; None: there is none.
    experts_device: "auto": what fits on the device; "cuda": all experts are there; "cpu": none.
    """
    kept = model.rest + model.kv * kv_tokens + workspace
    left, each = device_memory - kept, sum(layer.nbytes for layer in model.layers)
    most = max(layer.experts for layer in model.layers)
    parts = (
        f"{amount(model.rest, 'B')} of all but experts, {amount(model.kv * kv_tokens, 'B')} for "
        f"keys and values of {kv_tokens:,} tokens, {amount(workspace, 'B')} to work with"
    )
    if experts_device == "cuda":
        if left < model.experts:
            raise _too_small(
                device_memory, kept + model.experts, f"{parts}, and all experts", where
            )
        return Plan(model, _all(model), 0, 0, kv_tokens, device_memory, ram)
    if left >= model.experts and experts_device == "auto":
        return Plan(model, _all(model), 0, 0, kv_tokens, device_memory, ram)
    in_files = _in_files(model, ram, disk, where)
    if experts_device == "cpu":
        if left < 0:
            raise _too_small(device_memory, kept, parts, where)
        none = (0,) * len(model.layers)
        return Plan(model, none, 0, 0, kv_tokens, device_memory, ram, in_files)
    slots = min(most, max(left, 0) // each)
    spare, turning = max(1, min(8, slots // 8)), max(1, min(4, slots // 16))
    if slots < 3:
        needed = f"{parts}, and 3 experts of each layer"
        raise _too_small(device_memory, kept + 3 * each, needed, where)
    results = tuple(min(slots, layer.experts) for layer in model.layers)
    return Plan(model, results, spare, turning, kv_tokens, device_memory, ram, in_files)


def _in_files(model: Model, ram: int | None, disk: int | None, where: str) -> int:
    """How many layers, the last ones, have their experts in files."""
    if ram is None or ram >= model.experts:
        return 0
    if disk is None:
        raise OptionError(
            f"{amount(ram, 'B')} of memory",
            expected=f"{amount(model.experts, 'B')} for the experts of {len(model.layers)} layers",
            todo="raise max_memory['cpu'] (--ram), quantize the model to fewer bits, or name a "
            "folder on a disk for the rest: offload_folder (--offload-folder)",
            where=where,
        )
    layers = model.layers
    held = [layer.whole for layer in layers]
    in_files = next(n for n in range(len(layers) + 1) if sum(held[: len(layers) - n]) <= ram)
    needed = sum(held[len(layers) - in_files :]) + in_files * _MARGIN
    if disk < needed:
        raise OptionError(
            f"{amount(disk, 'B')} free in offload_folder",
            expected=f"{amount(needed, 'B')} for the experts of the last "
            f"{count(in_files, 'layer')}",
            where=where,
        )
    return in_files


def _limit(n: int) -> str:
    """As users give it, beside what it is compared with."""
    return f"{n / 2**30:.3g} GiB ({amount(n, 'B')})"


def _all(model: Model) -> tuple[int, ...]:
    return tuple(layer.experts for layer in model.layers)


def _too_small(result: int, needed: int, parts: str, where: str) -> OptionError:
    return OptionError(
        f"{amount(result, 'B')} of the device's memory",
        expected=f"{amount(needed, 'B')}: {parts}",
        todo="raise max_memory (--gpu-memory), or leave room for fewer tokens (kv_tokens, "
        "--kv-tokens, --length)",
        where=where,
    )


def _kv(config: Mapping[str, Any]) -> int:
    """Bytes of a token's keys and values in 16 bits, as transformers' caches keep them."""

    def entry(key: str) -> int:  # of the text model
        return number(config, "", (key,)) or 0

    heads = entry("num_attention_heads")
    if nope := entry("qk_nope_head_dim"):  # multi-head latent attention
        per_layer = heads * (nope + entry("qk_rope_head_dim") + entry("v_head_dim"))
    else:
        size = entry("head_dim") or entry("hidden_size") // max(heads, 1)
        per_layer = 2 * (entry("num_key_value_heads") or heads) * size
    return 2 * per_layer * entry("num_hidden_layers")


def _of_eight_bits(directory: Directory) -> dict[str, int]:
    """Bytes in memory of the tensors of weights in 8-bit floats, by name: scales of blocks are
    stored for each row, and linear layers beside weights of fewer bits become floats of 16.
    """
    stored, results = weights_in(directory), dict[str, int]()
    stay = all_eight_bits(stored)
    for weight in stored.values():
        scheme, (*lead, n, k) = weight.scheme, weight.shape
        if not scheme.eight_bits or scheme.encoding is None:
            continue
        held = {scheme.parts[0].part: 2 * prod(weight.shape)}
        if stay or _EXPERTS.match(weight.name):
            encoding = scheme.encoding
            shapes = {p: encoding.part_shape(p, tuple(lead), n, k) for p in encoding.parts}
            held = {p.name: prod(shape) * p.dtype.itemsize for p, shape in shapes.items()}
        results |= {entry.name: held.get(part, 0) for part, entry in weight.entries.items()}
    return results


def _no_experts(where: str) -> UnsupportedError:
    return UnsupportedError("no routed experts", expected="a mixture-of-experts model", where=where)
