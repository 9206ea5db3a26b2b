"""Models larger than the GPU: experts in the host's memory, some of them on the GPU too.

import fusion_moe.offload
plan = fusion_moe.offload.offload_(model, max_memory={0: "20GiB", "cpu": "100GiB"})
print(plan)
fusion_moe.offload.counters(model)    # hits, misses, copies, for each layer

offload.py       `offload_`; loading.py: `from_pretrained`; plan.py: what fits where,
                 train_plan.py: to train
experts.py       the module; steps.py, long_steps.py: its Fusion, cut before the sum of rows
cache.py         which experts are on the device; moves.py: which replace which
split.py         which misses are copied, which computed; machine.py, turnaround.py: how fast
device.py        what a layer asks of a device; cuda.py, launches.py, kernels/: a GPU;
                 pretended.py: the CPU in place of one
worker.py, requester.py
                 who computes what a device hands over; pinned.py: memory that it reads
folder.py        experts that memory has no room for
verification.py  what the experts of a model are
training.py      steps with adapters or gradients; buffers.py: what they copy, ahead
"""

from __future__ import annotations

from .experts import OffloadedExperts
from .offload import counters, explain, learn_, offload_
from .plan import Plan
from .verification import verify

__all__ = ["OffloadedExperts", "Plan", "counters", "explain", "learn_", "offload_", "verify"]
