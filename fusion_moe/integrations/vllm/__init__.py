"""A plug-in for vLLM that serves NVFP4, MXFP4, FP8 and INT4 experts with this library's operations.

    vllm serve DIRECTORY --quantization fusion_moe

vLLM calls `register`, the entry point in the group `vllm.general_plugins`, in each of its
processes; VLLM_PLUGINS says which plug-ins it loads.

config.py        who asks for it; names.py, states.py, log.py: of vLLM's
modelopt.py, compressed_tensors.py, mxfp4.py, fp8.py, deepseek_v4.py, loading.py
                 how weights are loaded
experts.py, linear.py, lora.py
                 the layers, and adapters of requests; exchange.py: ranks with tokens of their own
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Registers the quantization "fusion_moe" with vLLM. May be called again."""
    from .config import register_config

    register_config()
