"""offline.py for DeepSeek-V4 on a CPU. vLLM's attention needs Triton for CPUs, which PyPI does not
have: Triton's interpreter takes its place. And it mends a fault of vLLM 0.32: its metadata for
CPUs lacks one of the kinds of layers.
"""

from __future__ import annotations

import os
from collections import defaultdict
from types import SimpleNamespace


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder

    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, tokens: defaultdict(
        lambda: None
    )
    import offline

    offline.main()


if __name__ == "__main__":
    main()
