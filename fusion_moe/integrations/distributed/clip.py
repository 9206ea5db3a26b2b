"""The norm of gradients, some of which are divided between ranks while others are the same on every
rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ...nn.local import gathered


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for plain tensors, which must be equal on all ranks, and
    DTensors of any meshes, together.

    Returns the norm before clipping, the same on all ranks; all ranks must call it. torch's own
    takes DTensors of one mesh, or plain tensors.
    """
    groups: dict[Hashable, list[Tensor]] = defaultdict(list)
    for p in [parameters] if isinstance(parameters, Tensor) else parameters:
        if p.grad is not None:
            groups[getattr(p.grad, "device_mesh", None)].append(p)
    norms = [
        gathered(get_total_norm([p.grad for p in some if p.grad is not None], norm_type))
        for some in groups.values()
    ]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    for some in groups.values():
        clip_grads_with_norm_(some, max_norm, total)
    return total
