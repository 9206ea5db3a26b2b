"""The plug-in's logger: vLLM shows loggers under its own name. And the quantization's name."""

from __future__ import annotations

from vllm.logger import init_logger

NAME = "fusion_moe"
logger = init_logger("vllm.fusion_moe")
