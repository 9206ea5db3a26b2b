"""Adapters on disk, alone and in PEFT's layout: `save_lora` and `load_lora_`.

A directory has adapter_config.json and adapter_model.safetensors, as PEFT writes them for `target_parameters`: what was trained here loads
there, on the model in floating point, and what was trained there loads here.
"""

from .files import load_lora_, save_lora

__all__ = ["load_lora_", "save_lora"]
