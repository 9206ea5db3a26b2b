"""The block-scale swizzle against its formula, element by element, and its inverse."""

import doctest

import pytest
import torch
from bad_calls import messages
from cover import examples
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_moe import encodings, layouts
from fusion_moe.layouts import LAYOUTS, LINEAR, SF128X4, W16X64, groups

EDGES = [0, 1, 7, 15, 17, 127, 128, 129]
SIZES = st.lists(st.sampled_from(EDGES), min_size=1, max_size=6)


def ends_of(sizes):
    return groups.ends_from_sizes(torch.tensor(sizes, dtype=torch.int32))


def nvfuser_place(row, col, cols):
    """Where nvFuser's grouped layout puts (row, col) of a group, from the group's first element;
    cols padded to 4.
    """
    return row // 128 * 128 * cols + col // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


def by_formula(x, sizes, rows):
    """x [M, C] and the sizes of its groups -> [rows, ceil4(C)], one element at a time."""
    cols = -(-x.shape[1] // 4) * 4
    out, start, padded_start = [0] * (rows * cols), 0, 0
    for size in sizes:
        for row, values in enumerate(x[start : start + size].tolist()):
            for col, value in enumerate(values):
                out[padded_start * cols + nvfuser_place(row, col, cols)] = value
        start, padded_start = start + size, padded_start + -(-size // 128) * 128
    return torch.tensor(out, dtype=x.dtype).reshape(rows, cols)


def numbered(rows, cols, dtype=torch.int32):
    return torch.arange(1, rows * cols + 1, dtype=dtype).reshape(rows, cols)


def test_doctest():
    for module in (encodings.orders, layouts.tiled, layouts.sf128x4, layouts.w16x64):
        assert doctest.testmod(module).failed == 0


@examples(1.3)
@given(SIZES, st.integers(1, 9), st.integers(0, 3))
def test_groups_by_formula(sizes, cols, spare):
    """Every row of a group where the formula says, nothing else but zeros, as many rows as the
    bound says; rows of no group left out.
    """
    x, ends = numbered(sum(sizes) + spare, cols), ends_of(sizes)
    stored = SF128X4.forward(x, ends)
    assert stored.shape == SF128X4.storage_shape(tuple(x.shape), len(sizes))
    assert stored.shape == (groups.bound(len(x), len(sizes), 128), -(-cols // 4) * 4)
    assert torch.equal(stored, by_formula(x, sizes, len(stored)))
    x[sum(sizes) :] = 0
    assert torch.equal(SF128X4.inverse(stored, x.shape, ends), x)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (127, 4), (128, 4), (129, 5), (300, 17)])
def test_matrix_by_formula(rows, cols):
    x = numbered(rows, cols)
    stored = SF128X4.forward(x)
    assert stored.shape == SF128X4.storage_shape((rows, cols))
    assert torch.equal(stored, by_formula(x, [rows], len(stored)))
    assert torch.equal(SF128X4.inverse(stored, x.shape), x)
    assert torch.equal(SF128X4.forward(x, ends_of([rows])), stored)
    both = torch.stack([x, -x])[:, None]  # leading dimensions: each matrix alone
    assert torch.equal(SF128X4.forward(both), torch.stack([stored, -stored])[:, None])
    assert torch.equal(SF128X4.inverse(SF128X4.forward(both), both.shape), both)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.uint8,
        torch.bool,
        torch.float4_e2m1fn_x2,
        torch.bfloat16,
        torch.float32,
    ],
)
@pytest.mark.parametrize("ends", [None, ends_of([5, 0, 130])], ids=["matrix", "groups"])
def test_every_dtype_keeps_its_bytes(dtype, ends):
    x = (
        torch.randint(0, 256, (135, 24), dtype=torch.uint8) & (1 if dtype == torch.bool else 255)
    ).view(dtype)
    stored = SF128X4.forward(x, ends)
    assert stored.dtype == dtype
    assert torch.equal(
        SF128X4.inverse(stored, x.shape, ends).view(torch.uint8), x.view(torch.uint8)
    )
    if x.element_size() == 1:
        assert torch.equal(
            stored.view(torch.uint8),
            SF128X4.forward(x.view(torch.uint8).int(), ends).to(torch.uint8),
        )


def test_padding_is_never_read():
    """Whatever lies there: nvFuser leaves padding unwritten."""
    x, ends = torch.rand(40, 6).to(torch.float8_e4m3fn), ends_of([3, 0, 30])
    stored = SF128X4.forward(x, ends)
    real = SF128X4.forward(torch.ones_like(x.float()), ends) != 0
    stored.view(torch.uint8)[~real] = 0x7F
    back = SF128X4.inverse(stored, x.shape, ends).float()
    assert torch.equal(back[:33], x.float()[:33])
    assert (back[33:] == 0).all()


def test_rows_of_no_group_are_not_written():
    x, ends = torch.full((10, 4), float("nan")), ends_of([2, 3])
    x[:5] = 1
    assert SF128X4.forward(x, ends).sum() == 20


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6))
def test_bad_ends_touch_no_other_memory(ends):
    ends = torch.tensor(ends, dtype=torch.int32)
    x, safe = numbered(10, 4), groups.clamp_ends(ends, 10)
    assert torch.equal(SF128X4.forward(x, ends), SF128X4.forward(x, safe))
    assert torch.equal(
        SF128X4.inverse(SF128X4.forward(x, ends), x.shape, ends),
        SF128X4.inverse(SF128X4.forward(x, safe), x.shape, safe),
    )


def test_empty():
    ends = ends_of([0, 0])
    assert SF128X4.forward(torch.ones(0, 4), ends).shape == (0, 4)
    assert SF128X4.inverse(torch.ones(0, 4), (0, 4), ends).shape == (0, 4)
    assert (SF128X4.forward(torch.ones(3, 4), ends) == 0).all()
    assert (SF128X4.inverse(torch.ones(256, 4), (3, 4), ends) == 0).all()
    for shape in ((3, 0), (0, 3), (0, 3, 5)):
        x = torch.ones(shape, dtype=torch.uint8)
        assert SF128X4.inverse(SF128X4.forward(x), shape).shape == shape


def test_strided_and_shifted_tensors():
    bytes_ = torch.randint(0, 255, (2 * 140 * 8 + 1,), dtype=torch.uint8)
    x = bytes_[1:].view(140, 16)[:, ::2]  # not contiguous, at an odd address
    stored = SF128X4.forward(x)
    assert torch.equal(stored, SF128X4.forward(x.contiguous()))
    shifted = torch.cat([bytes_[:3], stored.flatten()])[3:].view(stored.shape)
    assert torch.equal(SF128X4.inverse(shifted, x.shape), x)


def test_nothing_waits_for_the_device():
    with FakeTensorMode():
        x, ends = torch.empty(20, 6, dtype=torch.float8_e4m3fn), torch.empty(3, dtype=torch.int32)
        stored = SF128X4.forward(x, ends)
        assert stored.shape == (384, 8)
        assert SF128X4.inverse(stored, (20, 6), ends).shape == (20, 6)


def test_traced_once_for_every_number_of_rows():
    def there_and_back(x, ends):
        stored = SF128X4.forward(x, ends)
        return stored, SF128X4.inverse(stored, x.shape, ends)

    traced = make_fx(there_and_back, tracing_mode="symbolic")(
        numbered(150, 8), ends_of([3, 0, 140])
    )
    for sizes in ([100, 0, 30], [2, 1, 300]):
        x, ends = numbered(sum(sizes) + 4, 8), ends_of(sizes)
        for got, want in zip(traced(x, ends), there_and_back(x, ends), strict=True):
            assert torch.equal(got, want)


def test_registry_and_linear():
    assert LAYOUTS == {"linear": LINEAR, "sf128x4": SF128X4, "w16x64": W16X64}
    x = numbered(5, 3)
    assert LINEAR.forward(x) is x
    assert LINEAR.inverse(x, x.shape) is x
    assert LINEAR.storage_shape((5, 3)) == (5, 3)


def test_refusals(golden):
    x, ends = numbered(5, 3), ends_of([5])
    golden(
        messages(
            {
                "a row": lambda: SF128X4.forward(x[0]),
                "groups of matrices": lambda: SF128X4.forward(x[None], ends),
                "ends of two dimensions": lambda: SF128X4.forward(x, ends[None]),
                "ends in int64": lambda: SF128X4.forward(x, ends.long()),
                "another size": lambda: SF128X4.inverse(x, (5, 3), ends),
                "another size, linear": lambda: LINEAR.inverse(x, (5, 4)),
            }
        )
    )
