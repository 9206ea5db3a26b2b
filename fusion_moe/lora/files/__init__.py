"""Adapters on disk, without their model and in PEFT's layout: `save_lora` and `load_lora_`.

A directory has adapter_config.json and adapter_model.safetensors, as PEFT writes them for
`target_parameters`: adapters trained here load in PEFT, on the model in floating point, and
adapters trained with PEFT load here.
"""

from .directory import load_lora_, save_lora

__all__ = ["load_lora_", "save_lora"]
