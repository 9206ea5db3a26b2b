"""What a program is compiled for, as plain facts. Nothing outside this file asks which chip it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .arch import Arch, shown
from .errors import UnsupportedError

# activation_format -> the encoding to which rows are quantized before each product
ROWS = {"nvfp4": "nvfp4", "fp8": "fp8_rows"}
# of all targets: activations as they come in, or quantized
ACTIVATION_FORMATS = ("bf16", "nvfp4", "int8", "fp8")


@dataclass(frozen=True)
class Target:
    """A kind of machine that programs are compiled for, and what its kernels can do.

    activation_formats: those that its grouped products accept; requires: the arch.FEATURES that one
    of them needs. schedulers: those that are asked whether one kernel can compute a piece, in order
    (`schedule.Scheduler`). operand_layouts: the layout in which products read the block scales of a
    quantized activation. device: the kind of device that its kernels run on, "" for every one;
    capability: the CUDA compute capability that they require; ran_on: the compute capabilities of
    the GPUs on which they have run.
    unshared_roles: roles of operations whose results are read only in the kernel that computes
    them. weight_layout: the one that its kernels read fastest; linear_weights: for activation
    formats, the encodings of weights that they read as they are. added_features: for each kind of
    product, up to how many features a second product may contract that is added in the same kernel;
    kernels of other kinds add none. quantized_results: encodings to which kernels of products can
    quantize the rows that they make; matrix_scales: those for which the kernel that quantizes a
    matrix can choose the scale of the whole. requantized_from: for a device and [G, N, K], from how
    many rows a matrix on average weights in few bits that are there in FP8 too are read as those.
    transposed_columns: encodings along rows of groups whose codes products over rows read by
    columns (`transpose_row_blocks`), on the GPU that programs are planned for.
    """

    name: str
    activation_formats: tuple[str, ...]
    schedulers: tuple[Any, ...]
    operand_layouts: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    capability: tuple[int, int] | None = None
    unshared_roles: tuple[str, ...] = ()
    ran_on: tuple[tuple[int, int], ...] = ()
    weight_layout: str = "linear"
    added_features: Mapping[str, int] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    linear_weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quantized_results: tuple[str, ...] = ()
    requantized_from: Callable[[torch.device, int, int, int], float] | None = None
    transposed_columns: Callable[[], tuple[str, ...]] = tuple
    matrix_scales: tuple[str, ...] = ()

    def layout_of(self, encoding: str, activation_format: str) -> str:
        """The layout in which products of such weights and activations are fastest."""
        as_they_are = self.linear_weights.get(activation_format, ())
        return "linear" if encoding in as_they_are else self.weight_layout


_WHERE = {
    "nvfp4": "nvfp4 activations require compute capability 10.0",
    "int8": "int8 activations require a CPU",
    "fp8": "fp8 activations require compute capability 8.9 or higher",
}


def why_not_on(target: Target, device: torch.device) -> str:
    """Why programs for a target cannot run on a device; "" if they can."""
    if target.capability is None:
        return (
            ""
            if target.device in ("", device.type)
            else (f"{target.name} requires {target.device.upper()} tensors, got {device}")
        )
    wanted = f"compute capability {shown(target.capability)}"
    if device.type != "cuda":
        return f"{target.name} requires a CUDA device with {wanted}, got {device}"
    device_capability = (
        torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    )
    if device_capability is None:
        return f"{target.name} requires a CUDA device with {wanted}, torch found none"
    return (
        ""
        if device_capability == target.capability
        else (f"{target.name} requires {wanted}, {device} has {shown(device_capability)}")
    )


def never_run(target: Target, capability: tuple[int, int]) -> str:
    """A warning where the kernels of a target for GPUs have not run on this compute capability yet;
    "" where they have.
    """
    return (
        ""
        if capability in target.ran_on
        else f"never run on compute capability {shown(capability)}"
    )


def check_device(target: Target, device: torch.device, where: str = "") -> None:
    """UnsupportedError if programs for a target cannot run on a device."""
    if why := why_not_on(target, device):
        raise UnsupportedError(
            why,
            expected="a target that runs on the tensors' device",
            todo=f"fusion_moe.explain(model, ..., target={target.name!r}) shows what would "
            "run there",
            where=where,
        )


def check_formats(
    target: Target, activation_format: str, where: str, gpu: Arch | None = None
) -> None:
    """UnsupportedError if the target, or the GPU that it is for, has no product on activations of
    this format: hardware never changes what was asked for.
    """
    on, formats = target.name, [*target.activation_formats]
    if gpu and gpu.why_not(target.requires.get(activation_format, ())):
        on = f"compute capability {shown(gpu.capability)}"
        formats = [f for f in formats if not gpu.why_not(target.requires.get(f, ()))]
    if activation_format in formats:
        return
    where_it_runs = _WHERE.get(activation_format, f"rows in {activation_format} have no kernels")
    raise UnsupportedError(
        f"activation_format = {activation_format!r} on {on}",
        expected=f"one of {', '.join(formats)}",
        todo=f"{where_it_runs}; options.override(target='reference') computes them in plain torch",
        where=where,
    )
