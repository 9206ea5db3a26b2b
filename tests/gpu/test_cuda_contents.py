"""Arguments whose elements are places in memory, or numbers of rows: CUDA's kernels make bad ones
safe, and report them.
"""

from __future__ import annotations

import pytest
import torch
from contents import bad_calls

import fusion_moe
from fusion_moe.errors import GroupsError, OptionError

pytestmark = pytest.mark.gpu
CALLS = [*bad_calls()]


def on_gpu(arguments):
    return {
        name: [t.cuda() for t in v]
        if isinstance(v, list)
        else v.cuda()
        if isinstance(v, torch.Tensor)
        else v
        for name, v in arguments.items()
    }


@pytest.mark.parametrize(
    ("name", "good", "argument", "cases"), CALLS, ids=[f"{c[0]} {c[2]}" for c in CALLS]
)
def test_bad_elements(name, good, argument, cases):
    op = getattr(torch.ops.fusion_moe, name)
    if argument != "peers":
        op(**on_gpu(good))
        fusion_moe.synchronize()
    wanted = OptionError if argument == "peers" else GroupsError
    for bad in cases:
        with pytest.raises(wanted):  # noqa: PT012  (whichever of the two sees it)
            op(**on_gpu(bad))
            fusion_moe.synchronize()
            pytest.fail(f"{bad[argument].tolist()} is taken")
