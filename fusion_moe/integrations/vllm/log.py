"""The plug-in's logger: vLLM shows loggers under its own name."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.fusion_moe")
