"""What the plug-ins of serving engines share: an engine makes parameters and loads them, and then
`Experts` takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import backends, options
from ..checkpoints import Scheme, check_scales_of
from ..encodings import Encoding, Quantized
from ..errors import ShapeError, UnsupportedError
from ..nn import Experts, prepare_, update_weights_
from ..nn.frozen import PackedModule
from ..runtime.host_memory import pages
from ..runtime.precompile import preparing

NAME = "fusion_moe"  # of the quantization
LEAVE = f"run without --quantization {NAME}"
# --load-format of states: the tensors of a rank's modules, as an engine has saved them
STATES = "sharded_state", "runai_streamer_sharded"
_DUMMY = 2.0**-12  # of weights that nobody loads: times codes, as large as engines make floats
# for a number of tokens, arguments of `fused_experts`
Adapters = Callable[[int], Mapping[str, Tensor]]


class AnyDtype:
    """A configuration of an engine, whose layers take activations in any of these dtypes."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The dtypes that activations may have."""
        return [torch.bfloat16, torch.float16, torch.float32]


class Named(AnyDtype):
    """One that an engine knows by this library's name."""

    @classmethod
    def get_name(cls) -> str:
        """The name of the quantization."""
        return NAME


class Chooser(Named):
    """What an engine finds under this name: it asks the result of `from_config` everything else."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Never asked."""
        raise NotImplementedError

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Never asked."""
        raise NotImplementedError


def unsupported(engine: str, text: str, expected: str, todo: str) -> UnsupportedError:
    """The error of what an engine serves, but not with this library."""
    where = f"{engine} with --quantization {NAME}"
    return UnsupportedError(text, expected=expected, todo=todo, where=where)


def refuse(engine: str, cases: Iterable[tuple[bool, str, str, str]]) -> None:
    """UnsupportedError for the first of some cases that holds: (whether it does, what was found,
    what was expected, what to do).
    """
    for holds, actual, expected, todo in cases:
        if holds:
            raise unsupported(engine, actual, expected, todo)


def of_states(load_format: str) -> tuple[bool, str, str, str]:
    """The case for `refuse` of an engine that is asked to load a state."""
    files = "a quantized directory's own files"
    return load_format in STATES, f"--load-format {load_format}", files, "leave it out"


def save_no_states_(engine: str, loader: Any) -> None:
    """Makes an engine refuse to save the states of modules of this library, in which it would not
    find the names that it loads.

    loader: the class whose `save_model(model, ...)` saves.
    """
    save = loader.save_model
    if save.__module__ == __name__:
        return

    def save_model(model: nn.Module, *args: Any, **options: Any) -> None:
        if any(name.endswith(".fusion_moe") for name, _ in model.named_modules()):
            raise unsupported(
                engine,
                "a sharded state to save, which could not be loaded",
                "the directory that is served: its files have the same weights",
                f"keep it, or {LEAVE}",
            )
        save(model, *args, **options)

    loader.save_model = staticmethod(save_model)


def need_blocks(encoding: Encoding, hidden: int, intermediate: int, where: str) -> None:
    """ShapeError for sizes of a rank's experts that are not whole blocks of the encoding."""
    for name, size in ("hidden", hidden), ("intermediate", intermediate):
        if size % encoding.block:
            todo = "choose another --tensor-parallel-size" if name == "intermediate" else LEAVE
            expected = f"a multiple of {encoding.block}, the block of {encoding.name}"
            raise ShapeError(f"{name} size {size}", expected=expected, todo=todo, where=where)


def place_(layer: nn.Module, names: Sequence[str]) -> None:
    """Moves the data of parameters to where `Experts` would place it, so that it does not copy."""
    for name in names:
        parameter = getattr(layer, name)
        parameter.data = pages.on_large_pages(parameter.data)


def weight_of(scheme: Scheme, tensors: Sequence[Tensor], where: str) -> Quantized:
    """The weight of the parts that an engine loaded, as files have them. NonFiniteError for scales
    that no quantizer writes, CheckpointError for those that are the wrong way round.
    """
    stored = zip(scheme.parts, tensors, strict=False)
    parts = [part.to_part(t, tuple(t.shape)) for part, t in stored]
    check_scales_of(scheme, parts, where)
    return scheme.quantized(parts)


def dummy_scales(scheme: Scheme) -> dict[str, float]:
    """By the names of parts in files, the numbers for scales where an engine draws weights instead
    of loading them (--load-format dummy).
    """
    scales, results = scheme.own_encoding.scales, {}
    for part, scale in zip(scheme.parts[1:], scales, strict=True):
        # floats of 8 bits are drawn as small as weights; of two scales, one is small
        small = not scheme.eight_bits and scale is scales[-1]
        t = torch.full((1, 1), _DUMMY if small else 1.0).to(scale.dtype)
        results[part.name] = part.from_part(t).flatten()[0].item()
    return results


def invariant(asked: bool) -> AbstractContextManager[Any]:
    """For an engine that was asked for answers that do not depend on the batch: inside, no other
    row changes a row's bits.
    """
    return options.override(order="row") if asked else nullcontext()


def compile_(
    experts: Experts, dtype: torch.dtype, slots: int, adapters: Adapters | None = None
) -> None:
    """Compiles the kernels for all numbers of tokens, so that no request waits for a compiler.
    Layers of one shape share them.

    dtype: of the tokens; slots: experts of each.
    """
    where, hidden = experts.weight_of("down").device, experts.shape_of("down")[1]
    # 1 token makes a program of its own
    with preparing("all"), torch.inference_mode():
        for tokens in (1, 2, 3):
            x = torch.zeros(tokens, hidden, dtype=dtype, device=where)
            ids = torch.zeros(tokens, slots, dtype=torch.int32, device=where)
            w = torch.zeros(tokens, slots, dtype=torch.float32, device=where)
            experts(x, ids, w, adapters(tokens) if adapters else None)


class Kept:
    """The tensors of a module that serves, while an engine loads others into the place where they
    came from. vLLM's reloading meanwhile takes all parameters and buffers off all modules.
    """

    def __init__(self, module: nn.Module):
        """module: prepared, so that its tensors stay where they are."""
        self.module = module
        for m in module.modules():
            if isinstance(m, PackedModule):
                m.lent = True
        self._own = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]

    def restored(self) -> Any:
        """The module, which has its tensors again."""
        for module, parameters, buffers in self._own:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        return self.module

    def update_(self, tensors: Mapping[str, Tensor]) -> None:
        """As `update_weights_`, after the module has its tensors again."""
        update_weights_(self.restored(), tensors)


def serve_(experts: Experts, dtype: torch.dtype, slots: int) -> str:
    """Prepares experts, compiles as `compile_`, and returns the line for an engine's log."""
    prepare_(experts)
    compile_(experts, dtype, slots)
    on = backends.find(options.current().target, experts.weight_of("down").device).name
    order = ", in row order" if options.current().row_order else ""
    served = f"experts in {experts.encoding.name}, activations in {dtype}, on {on}{order}"
    return f"fusion_moe serves {served}"
