"""What `import fusion_moe` imports: its public names, but for the lazy ones, and what registers the
operations in torch.ops.fusion_moe.
"""

from __future__ import annotations

from . import errors, nn, ops, options, recipe
from .bodies import (
    autocast as _torch_autocast,  # the operations' casts under torch.autocast
    autograd as _autograd,  # the operations' derivatives
    batched as _batched,  # the operations under torch.vmap
    eager as _eager,  # the bodies of the operations
)
from .compile import run
from .definitions.translate import translator
from .errors import Untranslatable
from .ir import FusionDefinition
from .nn import (
    FP8Config,
    INT4Config,
    MXFP4Config,
    NVFP4Config,
    NVFP4Experts,
    prepare_,
    qat_,
    quantize_,
    register_converter,
    update_weights_,
)
from .recipe import autocast
from .runtime.faults import synchronize
from .runtime.precompile import preparing

__all__ = [
    "FP8Config",
    "FusionDefinition",
    "INT4Config",
    "MXFP4Config",
    "NVFP4Config",
    "NVFP4Experts",
    "Untranslatable",
    "autocast",
    "errors",
    "nn",
    "ops",
    "options",
    "prepare_",
    "preparing",
    "qat_",
    "quantize_",
    "recipe",
    "register_converter",
    "run",
    "synchronize",
    "translator",
    "update_weights_",
]

del _autograd, _batched, _eager, _torch_autocast
