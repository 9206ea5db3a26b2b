"""offload_: puts what fits of a loaded model's experts on a device, and leaves the rest on the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import plugins
from ..errors import OptionError, UnsupportedError, need_one_of
from ..messages import bytes_of, count, log
from ..messages.progress import progress
from ..nn import Experts
from ..nn.frozen import Projections, own_parameters
from ..runtime.host_memory import pages
from . import folder as folders, machine as machines, plan as plans
from .cache import Cache
from .device import Counters, Device, HostStorage
from .experts import EVERY, OffloadedExperts
from .pretended import Pretended
from .split import Constants
from .steps import STEPS

PRETENDED = "pretended"
EXPERTS_DEVICES = ("auto", "cuda", "cpu")
_WHERE = "offload_"
_SLOWEST = 5e7  # bytes per second of a disk
Memory = Mapping[int | str, int | str]
Maker = Callable[[int, int], Callable[[HostStorage], Device]]


def offload_(
    model: nn.Module,
    max_memory: Memory,
    *,
    experts_device: str = "auto",
    kv_tokens: int = plans.KV_TOKENS,
    every: int = EVERY,
    offload_folder: str | Path | None = None,
) -> plans.Plan:
    """Moves a model to a device that is too small for it, in place, and freezes it. All but routed
    experts is there; experts stay in the host's memory, and as many as fit are on the device too,
    those that are used most.

    In a step, experts that are not there are copied, or the CPU computes them, whichever is faster
    by a model of this machine (measured once, and kept on disk). `fusion-moe plan` says before a
    model is loaded what fits.

    Args:
        model: a model whose experts are `fusion_moe.nn.Experts`, on the CPU: loaded in few bits, or
            quantized.
        max_memory: bytes, or texts such as "20GiB", as accelerate has them: {0: "20GiB", "cpu":
            "100GiB"}. 0: the number of a GPU, whose memory then holds weights, keys and values, and
            what is computed; "pretended" in its place: the CPU stands for a GPU, for tests. "cpu"
            may be left out.
        experts_device: "auto"; "cuda": all experts on the device, an error if they do not fit;
            "cpu": none, the CPU computes them all.
        kv_tokens: for how many tokens, of all sequences together, there is room for keys and
            values.
        every: the cache changes after so many steps of a layer; 0: it stays as it is.
        offload_folder: on a disk, for the experts of as many layers as "cpu" has no room for. They
            lie there in files without names, which go with the model. The CPU computes them where
            they are not on the device.

    Returns:
        What is where, which also goes to the log.

    Raises:
        OptionError: for too little memory or room in the folder, with how much is needed.
        UnsupportedError: for a model without such experts, or with adapters.

    An error comes before anything is moved. Experts stay frozen; adapters that are added afterwards
    train.
    """
    device, memory = device_and_bytes(max_memory)
    need_one_of("experts_device", experts_device, EXPERTS_DEVICES, where=_WHERE)
    for name, number in ("kv_tokens", kv_tokens), ("every", every):
        if not isinstance(number, int) or number < 0:
            raise OptionError(f"{name} = {number!r}", expected="0 or more", where=_WHERE)
    experts = _experts(model)
    sizes = plans.Model.of_module(model, experts)
    ram = max_memory.get("cpu")
    result = plans.make(
        sizes,
        memory,
        None if ram is None else bytes_of(ram),
        disk=None if offload_folder is None else _room(offload_folder, experts),
        kv_tokens=kv_tokens,
        workspace=workspace(device),
        experts_device=experts_device,
    )
    results = {}
    if not result.whole:
        results = _made(experts, result, _maker(device, result), every, offload_folder)
    for name, module in results.items():
        model.set_submodule(name, module)
    model.requires_grad_(False)
    if device != PRETENDED:
        model.to(device)
    log.info("%s", result)
    return result


@torch.inference_mode(False)  # steps write into what is made here, in whatever mode
def _made(
    experts: Mapping[str, Experts],
    plan: plans.Plan,
    make: Maker,
    every: int,
    folder: str | Path | None,
) -> dict[str, OffloadedExperts]:
    """The modules that take the place of others."""
    results, in_memory, shared = {}, {*list(experts)[: len(plan.in_memory)]}, dict[Any, Any]()
    for name, slots in progress(
        zip(experts, plan.slots, strict=True), "filling slots", len(experts)
    ):
        if folder is None or name in in_memory:
            module = experts[name].to("cpu")
        else:
            with pages.in_files(folder):
                _into_files(module := experts[name].to("cpu"))
        cached = slots - plan.spare
        cache = Cache(len(module.down_proj), cached, plan.turning)
        results[name] = OffloadedExperts.of(module, make(cached, plan.spare), cache, every, shared)
    return results


def _into_files(module: Experts) -> None:
    """Moves a module's weights to where `pages.empty` makes tensors now, unless they are there."""
    for p in own_parameters(module):
        if p.nbytes >= pages.PAGE and not p.is_shared():
            with torch.inference_mode(p.is_inference()):
                p.data = pages.empty(p.shape, p.dtype).copy_(p.data)


def _room(folder: str | Path, experts: Mapping[str, Experts]) -> int:
    """Bytes that a folder has for experts, with those that are in files already."""
    parameters = (p for module in experts.values() for p in own_parameters(module))
    there = sum(p.nbytes + pages.PAGE for p in parameters if p.is_shared())
    return folders.free(folder, _WHERE) + there


def counters(model: nn.Module) -> dict[str, Counters]:
    """Of each offloaded layer, by its name, what its steps did since it was offloaded: rows that
    hit and missed, experts that were copied and computed, bytes, nanoseconds of the CPU. Waits for
    them.
    """
    return {name: module.counters for name, module in _offloaded(model).items()}


def learn_(model: nn.Module) -> int:
    """Changes which experts are on the device, by their uses since the last change: for replayed
    graphs, in which no Python runs. Call it between steps. Returns how many experts were copied.
    UnsupportedError for a model without offloaded experts.
    """
    if not (offloaded := _offloaded(model)):
        raise UnsupportedError(
            f"no offloaded experts in a {type(model).__name__}",
            expected="at least one layer of them",
            todo="offload_(model, max_memory) first",
            where="learn_",
        )
    return sum(module.learn() for module in offloaded.values())


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """What a call of a model does in each offloaded layer: which experts it uses are there, which
    are copied and which the CPU computes, with the times that decide it; then the program of its
    steps.
    """
    lines, programs, hooks = list[str](), dict[str, None](), list[Any]()

    def say(name: str, module: OffloadedExperts, args: Any) -> None:
        line, program = module.explain(*args)
        lines.append(f"{name}: {line}")
        programs[program] = None

    for name, module in _offloaded(model).items():
        hooks.append(module.register_forward_pre_hook(partial(say, name)))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return "\n\n".join(["\n".join(lines), *programs])


@plugins.noted
def _noted(model: nn.Module) -> str:
    """What `fusion_moe.explain` says of a model: its graphs have one call for each such layer."""
    result = _offloaded(model).values()
    if not result:
        return ""
    here = sum(int((m.cache.expert_map >= 0).sum()) for m in result)
    return (
        f"the experts of {count(len(result), 'layer')} are offloaded, {here} of "
        f"{sum(m.storage.experts for m in result)} are on the device: a step is {STEPS}; "
        "fusion_moe.offload.explain(model, ...) prints its programs, what a call copies, and what "
        "the host computes"
    )


@plugins.recorded
def _recorded(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What `fusion_moe.record` has of each layer, whose programs know slots, not experts."""
    return {
        name: {"rows": module.uses(), **asdict(module.counters)}
        for name, module in _offloaded(model).items()
    }


def _offloaded(model: nn.Module) -> dict[str, OffloadedExperts]:
    return {n: m for n, m in model.named_modules() if isinstance(m, OffloadedExperts)}


def device_of(max_memory: Any) -> str | None:
    """The one device besides the CPU that max_memory names; None if there is none, or several."""
    if not isinstance(max_memory, Mapping):
        return None
    others = [key for key in max_memory if key != "cpu"]
    if len(others) != 1 or not (others[0] == PRETENDED or isinstance(others[0], int)):
        return None
    return PRETENDED if others[0] == PRETENDED else f"cuda:{others[0]}"


def workspace(device: str | None) -> int:
    """Bytes of a device that are left for what is computed."""
    return 0 if device == PRETENDED else plans.WORKSPACE


def device_and_bytes(max_memory: Memory) -> tuple[str, int]:
    """The device that max_memory names. OptionError for several, UnsupportedError for a GPU that is
    not there.
    """
    device = device_of(max_memory)
    if device is None:
        raise OptionError(
            f"max_memory = {max_memory!r}",
            expected="one device, and perhaps 'cpu': {0: '20GiB', 'cpu': '100GiB'}",
            where=_WHERE,
        )
    if device != PRETENDED and not torch.cuda.is_available():
        raise UnsupportedError(
            f"no GPU for {device}",
            todo="max_memory={'pretended': ...} lets the CPU stand for one",
            where=_WHERE,
        )
    (size,) = (size for key, size in max_memory.items() if key != "cpu")
    return device, bytes_of(size)


def _experts(model: nn.Module) -> dict[str, Experts]:
    """The experts of a model. UnsupportedError for others than those that can be offloaded."""
    results = {n: m for n, m in model.named_modules() if isinstance(m, Projections)}
    for name, module in results.items():
        why = ""
        if isinstance(module, OffloadedExperts):
            why = "offloaded already"
        elif not isinstance(module, Experts):
            why = f"{type(module).__name__}, whose function is the model's own"
        elif module.adapted:
            why = "experts with adapters, which are added after it"
        elif module.first_expert is not None or module.sharding is not None:
            why = "a share of experts that several ranks have"
        elif module.weights != "packed":
            why = f"experts that are read as {module.weights!r}"
        if why:
            raise UnsupportedError(
                f"{name or type(module).__name__}: {why}",
                expected="whole experts of one operation, as they were loaded or quantized",
                where=_WHERE,
            )
    if not results or "" in results:
        raise UnsupportedError(
            f"no experts of fusion_moe.nn in a {type(model).__name__}"
            if not results
            else f"{type(model).__name__} itself",
            expected="a model with experts in few bits",
            todo="fusion_moe.quantize_(model) first" if not results else "put it into a module",
            where=_WHERE,
        )
    return {name: module for name, module in results.items() if isinstance(module, Experts)}


def _maker(device: str, plan: plans.Plan) -> Maker:
    """(slots, spare) -> what makes the device of a layer from its storage. Layers of a model share
    what only one of them needs at a time.
    """
    if device == PRETENDED:
        rates = machines.PRETENDED
        return lambda slots, spare: (
            lambda storage: Pretended(storage, slots, spare, _costs(rates, storage))
        )
    from .cuda import Cuda, shared_of  # which looks for a GPU
    from .moves import LIMIT

    # a slow disk is no dead worker
    slow = max(layer.whole for layer in plan.model.layers) / _SLOWEST if plan.in_files else 0
    shared = list[Any]()

    def make(storage: HostStorage, slots: int, spare: int) -> Device:
        if not shared:
            shared.append(shared_of(storage, torch.device(device), limit=LIMIT + slow))
        costs = _costs(machines.of_gpu(device, storage), storage)
        result: Any = Cuda(storage, slots, spare, costs, shared[0], device)
        return result

    return lambda slots, spare: partial(make, slots=slots, spare=spare)


def _costs(rates: machines.Machine, storage: HostStorage) -> Constants:
    return rates.constants(storage.nbytes, storage.macs)
