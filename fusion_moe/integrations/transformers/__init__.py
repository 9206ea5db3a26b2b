"""Importing this package makes transformers load quantized checkpoints into our modules, and lets
its experts call our operations.

    import fusion_moe.transformers
    model = AutoModelForCausalLM.from_pretrained(directory)          # a ModelOpt directory in NVFP4
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fusion_moe")
    model.set_experts_implementation("fusion_moe")  # or for a model that is loaded already

The last two are for training and inference in the dtype of the weights, which remain the model's
own parameters.

loading.py       from_pretrained; share.py: what a rank reads; completeness.py: what was not read
quantizer.py     hooks of transformers; config.py: quantization_config; registration.py: names
replacements.py, sources.py, names.py, families.py
                 which modules lie where in files
tensors.py       from files to parameters and back; on_load.py: quantized on the way; saving.py
adapters.py, trainer.py, resizing.py
                 adapters, what Trainer saves, encoded heads
experts.py, routers.py
                 its modules by our operations
decoding.py, bench.py, evaluation.py
                 what the command line measures
"""

from __future__ import annotations

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .config import FP8Config, INT4Config, ModelOptConfig, MXFP4Config, NVFP4Config
from .experts import experts_forward
from .loading import from_pretrained
from .quantizer import FusionMoeQuantizer, before_training
from .registration import change_models, register, register_backend
from .routers import fuse_routers_
from .trainer import register_loading

__all__ = [
    "FP8Config",
    "INT4Config",
    "MXFP4Config",
    "NVFP4Config",
    "experts_forward",
    "from_pretrained",
    "fuse_routers_",
]

ALL_EXPERTS_FUNCTIONS.register("fusion_moe", experts_forward)
register("modelopt", ModelOptConfig, FusionMoeQuantizer)
register("fusion_moe", ModelOptConfig, FusionMoeQuantizer)
register_backend()
change_models()
before_training.append(register_loading)
