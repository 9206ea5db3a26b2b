"""Experts divided between the ranks of a DeviceMesh, for inference and training: `parallelize_`.

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fusion_moe.distributed.parallelize_(model, mesh, plan="ep")

Every rank has the same tokens, computes what its share of the weights adds to each of them, and gets the sum of all ranks. Everything
else in the model stays as it is, replicated. Other ways to divide tokens are not here yet: see docs/guides/distributed.md.
"""

from .parallelize import PLANS, parallelize_

__all__ = ["PLANS", "parallelize_"]
