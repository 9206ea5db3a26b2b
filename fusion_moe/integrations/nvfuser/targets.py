"""The GPUs that nvFuser's definitions are written for."""

from __future__ import annotations

from ...target import Target
from . import scheduler

_UNSHARED = ("grouped", "quantize", "layout")

HOPPER = Target(
    "sm_90",
    ("bf16",),
    (scheduler,),
    device="cuda",
    capability=(9, 0),
    ran_on=((9, 0),),
    unshared_roles=_UNSHARED,
)
BLACKWELL = Target(
    "sm_100",
    ("bf16", "nvfp4"),
    (scheduler,),
    {"nvfp4": "sf128x4"},
    device="cuda",
    capability=(10, 0),
    unshared_roles=_UNSHARED,
)
