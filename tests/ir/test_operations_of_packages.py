"""An operation that a package adds to the table, with a kernel of its own for CPUs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fusion_moe
from fusion_moe import FusionDefinition, options, plugins
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cpu import loops
from fusion_moe.compile import compile_fusion
from fusion_moe.errors import FusionError
from fusion_moe.ir.core import OpKind
from fusion_moe.ir.kinds import KINDS
from fusion_moe.ir.text import parse, text
from fusion_moe.ir.types import TensorType
from fusion_moe.options import Options

X = torch.arange(24.0).reshape(4, 6) - 12
HEADER = """
namespace {
bool cube(const float* x, long long count, float* y) {
    for (long long i = 0; i < count; ++i) y[i] = x[i] * x[i] * x[i];
    return true;
}
}
"""


def _type(x: TensorType) -> tuple[TensorType]:
    """x float32 -> x^3"""
    return (x,)


class Writer(loops.LoopsWriter):
    def _first_cube(self, op):
        (x,), (y,) = op.values, op.outputs
        return [f"if (!cube({self.array(x)}, 24, {self.names[y]})) return false;"]


def alone(fusion, target, kept=()):
    return None if target.name == "cpu" and len(fusion.ops) == 1 else "more than a cube"


CUBE = OpKind("cube", _type, lambda x: (x * x * x,), role="cube")


@pytest.fixture
def add(monkeypatch):
    """Adds an operation, as a package does."""
    monkeypatch.setattr(plugins.operations, "_functions", [*plugins.operations])
    return lambda kind: plugins.operations(lambda: [kind])


def program():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[4, 6], dtype="f32")
    fd.add_output(fd.ops.neg(fd.ops.cube(x)))
    return fd.fusion()


def test_it_is_one_of_all(add):
    with pytest.raises(FusionError, match="no operation is called 'cube'"):
        program()
    add(CUBE)
    assert "cube" in dir(FusionDefinition().ops)
    assert KINDS["cube"] is CUBE
    assert text(parse(text(program()))) == text(program())


def test_it_replaces_none_of_ours(add):
    before = KINDS["relu"]
    add(replace(CUBE, name="relu"))
    assert KINDS["relu"] is before


@pytest.mark.compiler
def test_it_brings_its_kernel(add, tmp_path):
    """Only CPUs have one here; the reference computes it elsewhere."""
    (tmp_path / "cube.h").write_text(HEADER)
    scheduler = SimpleNamespace(
        NAME="cubes", CONTRACTS_ROUNDING=False, can_schedule=alone, describe=str
    )

    def source(fusion):
        written = loops.source(fusion, Writer)
        return replace(written, more_headers=("cube.h",), folders=(tmp_path,))

    add(replace(CUBE, scheduler=scheduler, sources={"cpu": source}))
    kinds = [s.kind for s in compile_fusion(program(), TARGETS["cpu"], Options()).segments]
    assert kinds == ["cubes", "pointwise"]
    for target in "cpu", "reference":
        with options.override(target=target):
            (y,) = fusion_moe.run(program(), [X])
        torch.testing.assert_close(y, -(X**3), rtol=0, atol=0)


LINES = (
    "s = fd.define_groups('s', 2, stride=4)",
    "i0 = fd.define_tensor(shape=[4, 8], dtype='f32')",
    "i1 = fd.define_tensor(shape=[4, 2], dtype='i64')",
    "i2 = fd.define_tensor(shape=[4, 2], dtype='f32')",
    "i3 = fd.define_tensor(shape=[6], dtype='i64')",
    "t0, t1, t2, t3 = fd.ops.dispatch(i0, i1, i2, i3, groups=s, experts=4, group='g')",
    "fd.add_output(t0)",
)
PARSE = """
import sys
from fusion_moe.ir import parse
integration = "fusion_moe.integrations.distributed"
before = integration in sys.modules
(op,) = parse(sys.argv[1]).ops
print(op.kind.name, before, integration in sys.modules)
"""


def test_a_new_process_finds_those_in_a_text():
    """A graph that another process compiled, or a dump, is a text."""
    program = [sys.executable, "-c", PARSE, f"def fusion(fd): {'; '.join(LINES)}"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.stdout.split() == ["dispatch", "False", "True"], done.stderr
