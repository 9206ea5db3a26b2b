"""Run by test_caches.py: compiles a model several times, each time in another situation, and prints
which caches were hit, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from moe_models import Mlp, tokens
from torch._dynamo.utils import counters

from fusion_moe import options, translator
from fusion_moe.definitions import translate
from fusion_moe.frontends.inductor import fusion_pass


def compiled(**how: Any) -> dict[str, Any]:
    """What the caches said while the model was compiled, forward and backward, and whether it
    computed what it should.
    """
    torch._dynamo.reset()
    counters.clear()
    model, x = Mlp(), tokens(5).requires_grad_()
    got = torch.compile(model, backend="fusion_moe", fullgraph=True, **how)(x)
    got.sum().backward()
    want = model(tokens(5))
    hit = {
        "fx": counters["inductor"]["fxgraph_cache_hit"] > 0,
        "aot": counters["aot_autograd"]["autograd_cache_hit"] > 0,
    }
    return {**hit, "right": bool(torch.allclose(got, want, atol=1e-5))}


def registered() -> Any:
    """A context with one more translator."""
    translator("cache_process::never", version="1")(lambda fd, x: x)
    stack = mock.MagicMock()
    stack.__exit__.side_effect = lambda *_: translate.unregister("cache_process::never")
    return stack


SITUATIONS: dict[str, Callable[[], Any]] = {
    "as before": nullcontext,
    "other sources": lambda: mock.patch.object(fusion_pass, "library_digest", return_value="other"),
    "another translator": registered,
    "other options in force": lambda: options.override(contract_rounding=False),
}

if __name__ == "__main__":
    importlib.import_module("user_translator")  # of the test's folder, edited between processes
    results = {}
    for name in sys.argv[1:]:
        if name == "other options given":
            results[name] = compiled(options={"fusion_moe.contract_rounding": False})
        else:
            with SITUATIONS[name]():
                results[name] = compiled()
    print(json.dumps(results))
