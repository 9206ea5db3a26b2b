"""A plug-in for vLLM that serves experts in NVFP4, MXFP4 and INT4 with this library's operations.

    vllm serve DIRECTORY --quantization fusion_moe

vLLM calls `register`, the entry point in the group `vllm.general_plugins`, in each of its
processes.
"""

from __future__ import annotations

from .. import options

__all__ = ["register"]


def register() -> None:
    """Registers the quantization "fusion_moe" with vLLM, unless the option `vllm` is off. May be
    called again.
    """
    if options.current().vllm:
        from .config import register_config

        register_config()
    else:
        from .log import logger

        logger.info(
            "fusion_moe is off (FUSION_MOE_VLLM=0): vLLM does not know --quantization fusion_moe"
        )
