"""A plug-in for SGLang that serves experts in NVFP4 and MXFP4 with this library's operations.

    sglang serve --model-path DIRECTORY --quantization fusion_moe

SGLang calls `register`, the entry point in the group `sglang.srt.plugins`, in each of its
processes; SGLANG_PLUGINS says which plug-ins it loads.

config.py        who asks for it; experts.py: how weights are loaded, and the layer
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Registers the quantization "fusion_moe" with SGLang. May be called again."""
    from .config import register_config

    register_config()
