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


def on_gpu(arguments):
    return {
        name: [t.cuda() for t in v]
        if isinstance(v, list)
        else v.cuda()
        if isinstance(v, torch.Tensor)
        else v
        for name, v in arguments.items()
    }


def test_bad_elements():
    for name, good, argument, cases in bad_calls():
        op = getattr(torch.ops.fusion_moe, name)
        if argument != "peers":
            op(**on_gpu(good))
            fusion_moe.synchronize()
        for bad in cases:
            with pytest.raises(OptionError if argument == "peers" else GroupsError):
                print(name, argument, op(**on_gpu(bad)), fusion_moe.synchronize())
