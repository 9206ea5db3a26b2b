"""The logger of the plug-in. vLLM shows the loggers below its own name."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.fusion_moe")
