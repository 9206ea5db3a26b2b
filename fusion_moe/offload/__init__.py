"""Models larger than the GPU: experts in the host's memory, some of them on the GPU too.

import fusion_moe.offload
plan = fusion_moe.offload.offload_(model, max_memory={0: "20GiB", "cpu": "100GiB"})
print(plan)
fusion_moe.offload.counters(model)    # hits, misses, copies, for each layer
"""

from __future__ import annotations

from .experts import OffloadedExperts
from .offload import counters, explain, learn_, offload_
from .plan import Plan

__all__ = ["OffloadedExperts", "Plan", "counters", "explain", "learn_", "offload_"]
