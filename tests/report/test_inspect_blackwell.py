"""examples/inspect_blackwell.py shows both machines anywhere."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "inspect_blackwell.py"


@pytest.mark.slow
def test_definitions_or_what_to_install():
    out = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=True
    ).stdout
    assert out.count("(emitted, unexecuted); ") == 2
    assert "never run on compute capability 10.0" in " ".join(out.split())
    if importlib.util.find_spec("nvfuser_direct") is None:
        assert (
            out.count("nvFuser is not installed; pip install '.[nvfuser]' in a clone of fusion_moe")
            == 2
        )
    else:
        assert out.count("fd.ops.cutlass_nvfp4_grouped_mm(") == 2
        assert out.count("fd.ops.grouped_mm(tv") == 2
