"""The stub of `fd.ops` is what tools/ops_stub.py writes, and says what the methods do."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fusion_moe import FusionDefinition
from fusion_moe.errors import FusionError
from fusion_moe.ir.kinds import KINDS

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "ops_stub.py"))


def test_it_is_current():
    assert TOOL["STUB"].read_text(encoding="utf-8") == TOOL["stub"](), "python tools/ops_stub.py"


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_a_docstring(name):
    assert KINDS[name].doc
    assert getattr(FusionDefinition().ops, name).__doc__ == KINDS[name].doc


def test_what_python_completes():
    assert dir(FusionDefinition().ops) == sorted(KINDS)
    with pytest.raises(
        FusionError,
        match=r"is called 'cst'; expected one of dir\(fd.ops\); did you mean 'cast'\?$",
    ):
        FusionDefinition().ops.cst  # noqa: B018
