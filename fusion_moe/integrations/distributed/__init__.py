"""Experts divided between the ranks of a DeviceMesh, for inference and training: `parallelize_`.

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu",
        (torch.distributed.get_world_size(),))
    fusion_moe.distributed.parallelize_(model, mesh, plan="ep")

Each rank computes the contribution of its share of the weights to each token, and gets the sum over
all ranks. Tokens are the same on all ranks, or each rank has its own (tokens="sharded"). Everything
else in the model stays unchanged. docs/guides/distributed.md has a table.

parallelize.py   `parallelize_`; shares.py: of experts or of features; states.py: in state dicts
dispatch.py, all_to_all.py
                 collectives around a module's forward; collectives.py: as operations of torch
symmetric.py     memory that ranks of a node share, for exchange/ inside the program
clip.py          norms of gradients over ranks
"""

from .clip import clip_grad_norm_
from .parallelize import DISPATCH, PLANS, parallelize_

__all__ = ["DISPATCH", "PLANS", "clip_grad_norm_", "parallelize_"]
