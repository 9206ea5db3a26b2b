"""What tests do with Fusions: evaluate them and their texts, compare bits, and draw random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from judge import HAS_NVFUSER, judge
from torch import Tensor

from fusion_moe import FusionDefinition
from fusion_moe.definitions import operations
from fusion_moe.definitions.traced import tensor_type
from fusion_moe.encodings import NVFP4, Encoding, Quantized, quantize
from fusion_moe.encodings.mxfp8 import MXFP8, MXFP8_COLUMNS
from fusion_moe.ir.core import Fusion, Value
from fusion_moe.ir.text import NAMES, one_line, parse, text
from fusion_moe.ir.types import plain
from fusion_moe.nn import swiglu


def fusion_of_call(name: str, *args: Any, static: bool = False, **kwargs: Any) -> Fusion:
    """The Fusion of a call: for any number of rows, or static, for those of its arguments."""
    call = operations.bind(operations.SPECS[name], args, kwargs)
    types = operations.eager_types(call)
    if static:
        types = tuple((arg, tensor_type(dtype, shape)) for arg, shape, dtype in call.forms)
    return operations.fusion_of(name, types, call.others)


def executed(source: str) -> Fusion:
    """The Fusion that a printed one builds when Python runs it."""
    names = dict(NAMES)
    exec(source, names)
    fd = FusionDefinition()
    names["fusion"](fd)
    return fd.fusion()


def round_trip(fusion: Fusion) -> list[Fusion]:
    """The Fusion, and what its text builds when it is parsed, in one line too, and when it is run;
    all print the same.
    """
    source, line = text(fusion), one_line(fusion)
    assert "\n" not in line
    same = [fusion, parse(source), executed(source), parse(line)]
    assert [text(f) for f in same] == [source] * 4
    return same


def evaluate(fusion: Fusion, *inputs: Any) -> tuple[Any, ...]:
    """Fusion.evaluate, and the same bits from what its text builds. Where nvFuser is installed, its
    definitions are judged too.
    """
    first, parsed, *_ = round_trip(fusion.verify())
    outputs = first.evaluate(*inputs)
    assert_same_bits(parsed.evaluate(*inputs), outputs)
    if HAS_NVFUSER:
        judge(first, inputs)
    return outputs


def bits(value: Any) -> Any:
    """A tensor as integers, every NaN as one; a Quantized as a list of those."""
    if isinstance(value, Quantized):
        return [bits(t) for t in value]
    if value.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return value.view(torch.uint8)
    if value.is_floating_point():
        value = value.contiguous()
        return torch.where(
            value.isnan(),
            -1,
            value.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[value.element_size()]),
        )
    return value


def _assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            _assert_equal(x, y)
    else:
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_same_bits(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Equal dtypes, shapes and bits; 0.0 is not -0.0, NaN is NaN."""
    assert [type(v) for v in found] == [type(v) for v in expected]
    assert [v.dtype for v in found if isinstance(v, Tensor)] == [
        v.dtype for v in expected if isinstance(v, Tensor)
    ]
    for a, b in zip(found, expected, strict=True):
        _assert_equal(bits(a), bits(b))


def in_groups(fd: FusionDefinition, x: Value, offs: Value) -> tuple[Value, Value]:
    """The rows of x in groups that end at offs; the ends."""
    ends = fd.groups_of(offs, x.type.shape[0])
    return fd.ops.partition(x, ends), ends


def of_groups(name: str, **how: Any) -> Callable[..., Any]:
    """What builds an operation on rows in groups: (fd, x, *others, offs) -> its result."""

    def build(fd: FusionDefinition, x: Value, *given: Value) -> Any:
        rows, ends = in_groups(fd, x, given[-1])
        return getattr(fd.ops, name)(rows, *given[:-1], ends, **how)

    return build


class About:
    """A decorator that says which kinds of operations a test is about."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def __call__(self, *kinds: str) -> Callable[[Any], Any]:
        self.kinds |= set(kinds)
        return lambda test: test


def expert_mlp_variants(groups: int, hidden: int, intermediate: int) -> dict[str, dict[str, Any]]:
    """The options of expert_mlp, each by name; biases by their shapes."""
    return {
        "plain": {},
        "interleave": {"activation": swiglu(interleave=8)},
        "limit, alpha and offset": {
            "activation": swiglu(limit=7.0, alpha=1.702, up_offset=1.0, interleave=1),
        },
        "bias": {"gate_up_bias": (groups, 2 * intermediate), "down_bias": (groups, hidden)},
        "scale on the input": {"scale_on": "input"},
        "local experts": {"first_expert": 2},
    }


def mxfp8_copies(x: Tensor, axes: Sequence[int], ends: Tensor | None = None) -> Fusion:
    """As `copies`, in MXFP8."""
    by_axis = {encoding.axis: encoding for encoding in (MXFP8, MXFP8_COLUMNS)}
    return copies(x, [by_axis[axis] for axis in axes], ends)


def copies(x: Tensor, encodings: Sequence[Encoding], ends: Tensor | None = None) -> Fusion:
    """The parts of x in each encoding, and the numbers that they are; ends: of groups of its
    rows.
    """
    fd = FusionDefinition()
    v, of_rows = fd.from_pytorch(x), []
    if ends is not None:
        of_rows = [fd.groups_of(fd.from_pytorch(ends), x.shape[0])]
        v = fd.partition_by(v, of_rows[0])
    for encoding in encodings:
        name, of_runs = encoding.name, of_rows if encoding.axis == -2 else []
        parts = fd.ops.unpack(fd.ops.quantize(v, *of_runs, encoding=name))
        packed = fd.ops.pack(*parts, encoding=name, layout="linear")
        dtype = "f32" if name.endswith("_f32") else "bf16"
        for out in (*parts, fd.ops.dequantize(packed, *of_runs, dtype=dtype)):
            fd.add_output(out)
    return fd.fusion()


def numbers_of_all_sizes(rows: int, columns: int) -> Tensor:
    """f32 [rows, columns]: of all sizes, usual ones, zeros, infinity."""
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(rows, columns, generator=g)
        * torch.randint(-160, 120, (rows, columns), generator=g).exp2()
    )
    x[: rows // 4] = torch.randn(rows // 4, columns, generator=g)
    x[0], x[-1, -1] = 0, torch.inf
    return x


# rules for scales that kernels round weights to E2M1 codes by
RULES_OF_E2M1 = [
    ("nvfp4", "max"),
    ("nvfp4", "four_over_six"),
    ("nvfp4", "mse"),
    ("mxfp4", "max"),
    ("mxfp4", "mse"),
]


# of matrices, for rules that choose those of blocks
ODD_SCALES = torch.tensor(
    [1e-3, 1e-38, 1e-42, 0.0, -0.0, 1e-3, torch.nan, -1.0, 3e38, 2.0**-149, torch.inf]
)


def weights_to_round(matrices: int, n: int, k: int) -> Tensor:
    """f32 [matrices, N, K], seven matrices at least: of usual sizes, all sizes, near zero, ties of
    codes, zeros, usual ones; NaN in the last but one.
    """
    g = torch.Generator().manual_seed(0)
    x = torch.randn(matrices, n, k, generator=g)
    x[1] *= torch.randint(-140, 100, (n, k), generator=g).exp2()
    x[2] *= 2.0**-130
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[3] = ties[torch.randint(8, (n, k), generator=g)] * x[3].sign()
    x[3, :, 0::16] = 6.0
    x[4], x[5, 0, :40] = 0.0, -0.0
    x[-2, 3, 17] = torch.nan
    return x


# Random programs ----------------------------------------------------------------------------------

N, G, K = 16, 3, 2  # features, groups, slots of a token
OTHER = 5  # groups of another partition


class _Program:
    """A random program over tokens [T, N] and rows of groups [2 T / g, N]; each step takes values
    made before.
    """

    def __init__(self, draw: st.DrawFn):
        self.draw, self.fd = draw, FusionDefinition()
        t, self.g = self.fd.define_size("t"), self.fd.define_groups("g", G)
        self.t = t
        self.tokens = [self.fd.define_tensor(shape=[t, N], dtype=d) for d in ("f32", "bf16")]
        self.ids = self.fd.define_tensor(shape=[t, K], dtype="i64")
        self.w = self.fd.define_tensor(shape=[t, K], dtype="f32")
        self.bias = self.fd.define_tensor(shape=[G, N], dtype="f32", role="weight")
        self.dense = self.fd.define_tensor(shape=[G, N, N], dtype="bf16", role="weight")
        packed = [([G, N, N // 2], "u8"), ([G, N, N // 16], "f8e4m3"), ([G], "f32")]
        self.packed = [self.fd.define_tensor(shape=s, dtype=d, role="weight") for s, d in packed]
        self.others = self.fd.define_tensor(shape=[OTHER], dtype="i32")
        self.other_dense = self.fd.define_tensor(shape=[OTHER, N, N], dtype="bf16", role="weight")
        self.ends, self.row_of, self.slot_of = self.fd.ops.route(self.ids, groups=self.g)
        self.rows = [self.fd.ops.index_select(x, self.row_of, dim=0) for x in self.tokens]

    def pick(self, values: list[Value]) -> Value:
        return self.draw(st.sampled_from(values))

    def pool(self) -> list[Value]:
        return self.draw(st.sampled_from((self.tokens, self.rows)))

    def wide(self, x: Value) -> Value:
        return x if x.type.dtype == "f32" else self.fd.ops.cast(x, dtype="f32")

    def step(self) -> None:
        steps = (
            self.unary,
            self.binary,
            self.number,
            self.cast,
            self.silu,
            self.gather,
            self.product,
            self.product,
            self.add,
            self.combine,
            self.scaled,
            self.reshaped,
            self.again,
            self.masked,
            self.counted,
            self.other_ends,
            self.own_bias,
            self.own_scale,
            self.some,
            self.transposed,
            self.summed,
            self.chosen,
            self.routed,
            self.normalized,
        )
        self.draw(st.sampled_from(steps))()

    def unary(self) -> None:
        pool = self.pool()
        name = self.draw(st.sampled_from(("neg", "abs", "relu", "sigmoid", "tanh", "silu")))
        pool.append(getattr(self.fd.ops, name)(self.pick(pool)))

    def binary(self) -> None:
        pool = self.pool()
        name = self.draw(st.sampled_from(("add", "sub", "mul", "minimum")))
        pool.append(
            getattr(self.fd.ops, name)(self.wide(self.pick(pool)), self.wide(self.pick(pool)))
        )

    def number(self) -> None:
        pool = self.pool()
        name = self.draw(st.sampled_from(("add", "mul", "maximum")))
        pool.append(
            getattr(self.fd.ops, name)(
                self.pick(pool), self.draw(st.sampled_from((0.0, -0.0, 1.0, 0.3)))
            )
        )

    def cast(self) -> None:
        pool = self.pool()
        pool.append(
            self.fd.ops.cast(
                self.pick(pool), dtype=self.draw(st.sampled_from(("f32", "bf16", "f16")))
            )
        )

    def silu(self) -> None:
        pool, ops = self.pool(), self.fd.ops
        x = self.wide(self.pick(pool))
        pool.append(ops.div(x, ops.add(ops.exp(ops.neg(x)), 1.0)))

    def gather(self) -> None:
        self.rows.append(self.fd.ops.index_select(self.pick(self.tokens), self.row_of, dim=0))

    def product(self) -> None:
        w = (
            self.fd.ops.pack(*self.packed, encoding="nvfp4", layout="linear")
            if self.draw(st.booleans())
            else self.dense
        )
        self.rows.append(self.fd.ops.grouped_mm(self.pick(self.rows), w, self.ends))

    def transposed(self) -> None:
        """A product of a weight stored the other way."""
        self.rows.append(self.fd.ops.grouped_mm_t(self.pick(self.rows), self.dense, self.ends))

    def summed(self) -> None:
        """The rows of each group, added to all of them."""
        x = self.pick(self.rows)
        self.rows.append(
            self.fd.ops.group_add(self.wide(x), self.fd.ops.group_sum(x, self.ends), self.ends)
        )

    def add(self) -> None:
        self.rows.append(
            self.fd.ops.group_add(self.wide(self.pick(self.rows)), self.bias, self.ends)
        )

    def combine(self) -> None:
        self.tokens.append(self.fd.ops.combine(self.pick(self.rows), self.slot_of, self.w))

    def chosen(self) -> None:
        """Rows of slots added with the weights of a router."""
        # what was computed may be rounded elsewhere, and then order otherwise
        x = self.pick(self.tokens[:2])
        w = self.fd.ops.topk_weights(
            x, self.fd.ops.topk_ids(x, 0, k=K), renormalize=self.draw(st.booleans())
        )
        self.tokens.append(self.fd.ops.combine(self.pick(self.rows), self.slot_of, w))

    def routed(self) -> None:
        """The columns of tokens that are their largest numbers."""
        x = self.pick(self.tokens[:2])
        ids = self.fd.ops.topk_ids(x, 0, k=K)
        mine = self.fd.ops.routing_map(ids, experts=plain(x.type.shape[1]))
        self.tokens.append(self.fd.ops.where(mine, x, 0.0))

    def normalized(self) -> None:
        pool = self.pool()
        x = self.wide(self.pick(pool))
        pool.append(self.fd.ops.sub(x, self.fd.ops.logsumexp(x)))

    def scaled(self) -> None:
        pool = self.pool()
        x = self.wide(self.pick(pool))
        pool.append(self.fd.ops.mul(x, self.fd.ops.sum(x, dims=(1,), keepdim=True)))

    def reshaped(self) -> None:
        x = self.pick(self.rows)
        plain_rows = self.fd.ops.reshape(x, new_shape=tuple(map(plain, x.type.shape)))
        self.rows.append(self.fd.ops.partition(plain_rows, self.ends))

    def again(self) -> None:
        """An operation that is there already."""
        pool = self.pool()
        x = self.pick(pool)
        pool += [self.fd.ops.neg(x), self.fd.ops.neg(x)]

    def masked(self) -> None:
        """A comparison with a number, which a dtype may round, and a choice by it."""
        pool, number = (
            self.pool(),
            self.draw(st.sampled_from((0, 0.3, -0.0, float("inf"), float("nan"), 2**24 + 1))),
        )
        # what was computed may be rounded elsewhere, and then be on the other side of a number
        given = self.pick(pool[:2])
        mask = getattr(self.fd.ops, self.draw(st.sampled_from(("lt", "ge", "eq", "ne"))))(
            given, number
        )
        pool.append(
            self.fd.ops.where(
                mask, self.pick(pool), self.draw(st.sampled_from((-1.0, float("inf"), 0.3)))
            )
        )

    def counted(self) -> None:
        """A mask as whole numbers of some dtype, and back."""
        pool = self.pool()
        count = self.fd.ops.cast(
            self.fd.ops.gt(self.pick(pool[:2]), 0),
            dtype=self.draw(st.sampled_from(("u8", "i32", "i64"))),
        )
        pool.append(
            self.fd.ops.cast(
                self.fd.ops.mul(count, self.draw(st.sampled_from((0, 3, 127)))), dtype="f32"
            )
        )

    def other_ends(self) -> None:
        """The rows partitioned anew by other ends, of more groups; a product by them, and rows of
        the first partition again.
        """
        x, ops = self.pick(self.rows), self.fd.ops
        m, g = 2 * self.t, self.fd.define_groups(f"h{len(self.rows)}", OTHER)
        ends = ops.ends(self.others, rows=m, groups=g)
        plain_rows = ops.reshape(x, new_shape=(m, N))
        y = ops.grouped_mm(ops.partition(plain_rows, ends), self.other_dense, ends)
        self.rows.append(ops.partition(ops.reshape(y, new_shape=(m, N)), self.ends))

    def own_bias(self) -> None:
        """A bias that is computed, or a constant."""
        x, ops = self.wide(self.pick(self.rows)), self.fd.ops
        bias = (
            ops.mul(self.bias, 2.0)
            if self.draw(st.booleans())
            else ops.full(shape=(G, N), fill_value=0.5, dtype="f32")
        )
        self.rows.append(ops.group_add(x, bias, self.ends))

    def own_scale(self) -> None:
        """Rows times a number of each column of their group."""
        x = self.wide(self.pick(self.rows))
        self.rows.append(self.fd.ops.group_mul(x, self.bias, self.ends))

    def some(self) -> None:
        """All columns, taken apart and put together in another order."""
        pool = self.pool()
        x, at, ops = self.pick(pool), self.draw(st.integers(1, N - 1)), self.fd.ops
        rows = x.type.shape[0]
        parts = [
            ops.slice(x, start_indices=(0, a), end_indices=(rows, b)) for a, b in ((at, N), (0, at))
        ]
        joined = ops.cat(*parts, dim=1)
        pool.append(ops.partition(joined, self.ends) if pool is self.rows else joined)


@st.composite
def programs(draw: st.DrawFn) -> Fusion:
    """A random verified Fusion with one to three outputs. Its inputs: `inputs_of`."""
    program = _Program(draw)
    for _ in range(draw(st.integers(0, 10))):
        program.step()
    made = [v for v in (*program.rows, *program.tokens) if v not in program.tokens[:2]]
    for v in draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True)):
        program.fd.add_output(v)
    return program.fd.fusion()


def inputs_of(tokens: int, seed: int = 0) -> list[Tensor]:
    """Inputs of the Fusions that `programs` draws."""
    g = torch.Generator().manual_seed(seed)
    x, w, bias = (torch.randn(s, generator=g) for s in ((tokens, N), (tokens, K), (G, N)))
    dense, q = (
        torch.randn(G, N, N, generator=g).bfloat16(),
        quantize(torch.randn(G, N, N, generator=g), NVFP4),
    )
    ids = torch.randint(0, G, (tokens, K), generator=g)
    others = torch.randint(0, tokens * K + 1, (OTHER,), generator=g).sort().values.int()
    return [
        x,
        x.bfloat16() * 2,
        ids,
        w,
        bias,
        dense,
        *q,
        others,
        torch.randn(OTHER, N, N, generator=g).bfloat16(),
    ]
