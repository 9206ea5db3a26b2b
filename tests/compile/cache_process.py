"""Run by test_caches.py: compiles a model, then again with one more translator for each name that
is given, and prints which caches were hit and what was fused, as JSON.
"""

from __future__ import annotations

import json
import sys

import precompiled
import torch
from moe_models import Mlp, tokens
from torch._dynamo.utils import counters

import fusion_moe
from fusion_moe import translator


def compiled() -> tuple[bool, bool]:
    """Whether Inductor's and AOTAutograd's caches were hit while the model was compiled, forward
    and backward.
    """
    torch._dynamo.reset()
    counters.clear()
    model, x = Mlp(), tokens(5).requires_grad_()
    got = torch.compile(model, backend="fusion_moe", fullgraph=True)(x)
    got.sum().backward()
    torch.testing.assert_close(got, model(tokens(5)), rtol=0, atol=1e-5)
    return (
        counters["inductor"]["fxgraph_cache_hit"] > 0,
        counters["aot_autograd"]["autograd_cache_hit"] > 0,
    )


if __name__ == "__main__":
    precompiled.use()
    hits = {"as before": compiled()}
    report = fusion_moe.last_compiled().details()
    for name in sys.argv[1:]:
        translator(name, version="1")(lambda fd, x: x)
        hits[name] = compiled()
    print(json.dumps([hits, report]))
