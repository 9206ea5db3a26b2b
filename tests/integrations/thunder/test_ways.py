"""thunder's default executors on a GPU, a pretended one, beside ours: without and with nvFuser in
front.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.thunder,
    pytest.mark.nvfuser,
    pytest.mark.compiler,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is pretended where there is none"),
]

TOOL = Path(__file__).resolve().parents[3] / "tools" / "pretended_gpu"
PROGRAM = """
import thunder, torch
import fusion_moe
from fusion_moe.thunder import thunder_executors
for nvfuser in (False, True):
    executors = thunder_executors(nvfuser=nvfuser)
    f = thunder.jit(lambda x: torch.sin(x) * x + 1, executors=executors)
    f(torch.zeros(8, 64, device="cuda"))
    print([b.sym.name for b in thunder.last_traces(f)[-1].bound_symbols if b.sym.is_fusion])
"""


def test_thunders_own_nvfuser_finds_its_module(tmp_path):
    """the one that its version asks for, which nvFuser's wheels no longer have"""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, TOOL, "9.0", program], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("['nvFusion0']") == 2
