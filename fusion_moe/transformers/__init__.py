"""Importing it makes transformers load quantized checkpoints into this library's modules, and its experts call this library's operations.

    import fusion_moe.transformers
    model = AutoModelForCausalLM.from_pretrained(directory)          # a ModelOpt directory in NVFP4
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fusion_moe")
    model.set_experts_implementation("fusion_moe")  # or of a model that is there already

The last two are for training and inference, in the dtype of the weights, which stay the model's own parameters.
"""

from __future__ import annotations

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .config import ModelOptConfig, NVFP4Config
from .experts import experts_forward
from .loading import from_pretrained
from .quantizer import FusionMoeQuantizer
from .registration import register
from .routers import fuse_routers_

__all__ = ["NVFP4Config", "experts_forward", "from_pretrained", "fuse_routers_"]

ALL_EXPERTS_FUNCTIONS.register("fusion_moe", experts_forward)
register("modelopt", ModelOptConfig, FusionMoeQuantizer)
register("fusion_moe", ModelOptConfig, FusionMoeQuantizer)
