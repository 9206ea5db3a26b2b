"""What a program is compiled for, as plain facts. Nothing outside this file asks which chip it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .errors import OptionError, UnsupportedError


@dataclass(frozen=True)
class Target:
    """A kind of machine.

    activation_formats: those its grouped products take. operand_layouts: the layout in which they read the block scales of a
    quantized activation. executed: whether this version of the library runs programs for it.
    """

    name: str
    activation_formats: tuple[str, ...]
    operand_layouts: Mapping[str, str] = field(default_factory=dict)
    executed: bool = True


TARGETS = {
    t.name: t
    for t in (
        Target("reference", ("bf16", "nvfp4")),
        Target("cpu", ("bf16",)),
        Target("cuda", ("bf16",)),
        Target("sm_100", ("bf16", "nvfp4"), operand_layouts={"nvfp4": "sf128x4"}, executed=False),
    )
}


def find(name: str, device: torch.device) -> Target:
    """The target called `name`; "auto" is the kind of `device`. OptionError for a name that is none."""
    wanted = device.type if name == "auto" else name
    if wanted not in TARGETS:
        todo = "move the tensors to a device of that kind" if name == "auto" else ""
        raise OptionError(f"target {wanted!r}", expected=f"one of auto, {', '.join(TARGETS)}", todo=todo)
    return TARGETS[wanted]


def check_formats(target: Target, activation_format: str, where: str) -> None:
    """UnsupportedError if the target has no product on activations of this format: hardware never changes what was asked for."""
    if activation_format not in target.activation_formats:
        raise UnsupportedError(
            f"activation_format = {activation_format!r} on {target.name}",
            expected=f"one of {', '.join(target.activation_formats)}",
            todo="nvfp4 activations need compute capability 10.0; options.override(target='reference') computes them in plain torch",
            where=where,
        )
