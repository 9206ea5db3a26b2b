"""Programs that could read or write outside of their tensors: they do not verify, or raise when
they are run, before memory is touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusion_moe
from fusion_moe import FusionDefinition
from fusion_moe.errors import Error, FusionError, GroupsError, ShapeError

pytestmark = pytest.mark.compiler


def refused(
    fd: FusionDefinition, *tensors: torch.Tensor, error: type[Error] = ShapeError, match: str = ""
) -> None:
    """The program raises, evaluated and compiled."""
    fusion = fd.fusion()
    with pytest.raises(error, match=match):
        fusion.evaluate(*tensors)
    with pytest.raises(error, match=match):
        fusion_moe.run(fusion, list(tensors))


def test_ends_of_more_rows_than_they_partition():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[5, 16], dtype="f32")
    ends = fd.ops.ends(
        fd.define_tensor(shape=[2], dtype="i32"), rows=1000, groups=fd.define_groups("g", 2)
    )
    with pytest.raises(FusionError, match="5 rows partitioned by g, which partitions 1000"):
        fd.ops.partition(x, ends)


def test_rows_of_two_numbers_by_one_partition():
    """In inputs too, and whatever came first."""
    fd = FusionDefinition()
    m, g = fd.define_size("m"), fd.define_groups("g", 2)
    fd.define_tensor(shape=[m / g, 16], dtype="f32")
    with pytest.raises(
        FusionError,
        match=r"(1 \+ m|m \+ 1) rows partitioned by g, which "
        r"partitions m rows",
    ):
        fd.define_tensor(shape=[(m + 1) / g, 16], dtype="f32")


@pytest.mark.parametrize(("start", "end"), [(0, 9), (6, 9), (9, 9), (-1, 2), (3, 2)])
def test_slices_past_a_symbolic_size(start, end):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    if start < 0 or start > end:
        with pytest.raises(ShapeError, match="slice"):
            fd.ops.slice(x, [start, 0], [end, 4])
        return
    fd.add_output(fd.ops.slice(x, [start, 0], [end, 4]))
    refused(fd, torch.zeros(5, 4), match="slice")


def test_slices_by_other_sizes():
    fd = FusionDefinition()
    x, y = (fd.define_tensor(shape=[-1, 4], dtype="f32") for _ in range(2))
    fd.add_output(fd.ops.neg(fd.ops.slice(x, [0, 0], [y.type.shape[0], 4])))
    refused(fd, torch.zeros(5, 4), torch.zeros(6, 4), match="slice")
    assert fusion_moe.run(fd.fusion(), [torch.zeros(5, 4), torch.zeros(5, 4)])[0].shape == (5, 4)


def test_a_size_that_becomes_negative():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    fd.add_output(fd.ops.full(shape=[x.type.shape[0] - 3, 4], fill_value=0.0, dtype="f32"))
    refused(fd, torch.zeros(2, 4), match="negative")
    assert fusion_moe.run(fd.fusion(), [torch.zeros(3, 4)])[0].shape == (0, 4)


@pytest.mark.parametrize("slots", [[0, 1, 2, 2], [0, 1, 2, 4], [0, 1, 2, -1], [3, 3, 3, 3]])
def test_what_is_no_permutation_is_not_inverted(slots):
    fd = FusionDefinition()
    slot_of = fd.define_tensor(shape=[2, 2], dtype="i32")
    x = fd.define_tensor(shape=[4, 8], dtype="f32")
    fd.add_output(fd.ops.index_select(x, fd.ops.invert(slot_of, 4), 0))
    refused(
        fd,
        torch.tensor(slots).int().reshape(2, 2),
        torch.randn(4, 8),
        error=GroupsError,
        match="slot_of",
    )


def two_rows() -> FusionDefinition:
    """Two rows of x f32[s0, 8], by their numbers i32[2]."""
    fd = FusionDefinition()
    x, at = fd.define_tensor(shape=[-1, 8], dtype="f32"), fd.define_tensor(shape=[2], dtype="i32")
    fd.add_output(fd.ops.neg(fd.ops.index_select(x, at, 0)))
    return fd


@pytest.mark.parametrize("index", [4, -1, 2**31 - 1, -(2**31)])
def test_an_index_that_is_no_row(index):
    with pytest.raises((Error, IndexError)):
        fusion_moe.run(two_rows().fusion(), [torch.zeros(4, 8), torch.tensor([0, index]).int()])


def test_rows_of_nothing():
    refused(two_rows(), torch.zeros(0, 8), torch.zeros(2).int(), match="which has none")


def test_more_elements_than_can_be_counted():
    fd = FusionDefinition()
    a, b = (fd.define_tensor(shape=[-1, 0], dtype="f32") for _ in range(2))
    m, n = a.type.shape[0], b.type.shape[0]
    fd.add_output(
        fd.ops.slice(fd.ops.full(shape=[m, n], fill_value=1.0, dtype="f32"), [0, 0], [1, 1])
    )
    refused(fd, torch.zeros(2**40, 0), torch.zeros(2**40, 0), match="63 bits")


@pytest.mark.parametrize(
    "shape", [[2**32, 2**31], [2**32, 2**32 + 1], [2**32, 2**31, 0], [2**32, -1, 2**31]]
)
def test_types_of_more_elements_than_can_be_counted(shape):
    fd = FusionDefinition()
    x, some = (
        fd.define_tensor(shape=[1], dtype="f32"),
        fd.define_tensor(shape=[-1], dtype="f32").type.shape[0],
    )
    shape = [some if n == -1 else n for n in shape]
    makers = [
        lambda: fd.ops.full(shape=shape, fill_value=1.0, dtype="f32"),
        lambda: fd.ops.broadcast_in_dim(x, shape=[*shape, 1], broadcast_dims=[len(shape)]),
        lambda: fd.define_tensor(shape=shape, dtype="u8"),
    ]
    for make in makers:
        with pytest.raises(ShapeError, match="63 bits"):
            make()


def test_as_many_elements_as_can_be_counted():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[1], dtype="f32")
    fd.add_output(
        fd.ops.slice(
            fd.ops.broadcast_in_dim(x, shape=[2**31, 2**32 - 1], broadcast_dims=[1]),
            [7, 2**32 - 2],
            [8, 2**32 - 1],
        )
    )
    assert fusion_moe.run(fd.fusion(), [torch.tensor([3.0])])[0].tolist() == [[3.0]]


def test_what_is_empty_takes_no_time():
    """Kernels do not count through dimensions without elements, which would take years, and which
    Ctrl-C would not end.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("empty_but_endless.py")), "cpu"]
    done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_inputs_whose_names_are_types_of_cpp():
    """The 33rd input of a program is i32, the 65th i64."""
    fd = FusionDefinition()
    values = [fd.define_tensor(shape=[4], dtype="f32") for _ in range(66)]
    total = values[0]
    for v in values[1:]:
        total = fd.ops.add(total, v)
    fd.add_output(total)
    assert (
        fusion_moe.run(fd.fusion(), [torch.full((4,), float(i)) for i in range(66)])[0].tolist()
        == [65 * 33.0] * 4
    )
