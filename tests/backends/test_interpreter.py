"""The interpreter of printed nvFuser definitions: the text, and, where nvFuser is installed, its
definitions against torch.
"""

import math
from itertools import product

import pytest
import torch
from definitions import (
    DTYPES,
    computed,
    defined,
    dequantized,
    nvfp4_problem,
    run,
    same,
    sample,
    starts_of,
    tensor_line,
    text_of,
)
from interpreter import UnknownOperation, canonical, interpret, output_dtypes, rebuilt, round_trip
from meaning import OPS
from meaning.blockscale import unswizzle
from meaning.pointwise import POINTWISE
from meaning.values import E2M1, E4M3, Refused

nvfuser = pytest.mark.nvfuser

# The text -----------------------------------------------------------------------------------------


def test_inputs_in_order_and_dead_code():
    text = text_of(
        "c0 = fd.define_scalar(None, dtype=DataType.Int)",
        tensor_line("tv0", [-1, 4], "Float"),
        "c7 = fd.ops.div(128, 16)",
        "c5 = fd.define_scalar(None, dtype=DataType.Double)",
        "tv8 = fd.ops.exp(tv0)",
        "c9 = fd.ops.cast(c0, dtype=DataType.Index)",
        "tv1 = fd.ops.reshape(tv0, new_shape=[c9, 2, 2])",
        "tv2 = fd.ops.mul(tv1, c5)",
        "fd.add_output(tv2)",
        "fd.add_output(tv1)",
        "fd.add_output(tv2)",
    )
    x = torch.randn(3, 4)
    outputs = interpret(text, [3, x, 0.1])
    for got, want in zip(outputs, (x * 0.1, x, x * 0.1), strict=True):
        same(got, want.reshape(3, 2, 2))


def test_an_unknown_operation_is_named():
    with pytest.raises(UnknownOperation, match=r"fd\.ops\.welford has no meaning"):
        run("fd.ops.welford(tv0, dims=[0])", torch.ones(3))


@pytest.mark.parametrize(
    ("line", "inputs", "message"),
    [
        ("fd.ops.add(tv0, tv1)", (torch.ones(2), torch.ones(2).double()), "several dtypes"),
        ("fd.ops.add(tv0, tv1)", (torch.ones(2), torch.ones(1, 2)), "several ranks"),
        (
            "fd.ops.add(tv0, tv1)",
            (torch.ones(2).bfloat16(), torch.ones(2).bfloat16()),
            "add of BFloat16",
        ),
        ("fd.ops.relu(tv0)", (torch.ones(2).bfloat16(),), "relu of BFloat16"),
        ("fd.ops.mul(tv0, 2)", (torch.ones(2),), "with a Float operand"),
        ("fd.ops.mul(tv0, 2.0)", (torch.ones(2).int(),), "with a Int32 operand"),
        ("fd.ops.where(tv0, tv0, tv0)", (torch.ones(2).int(),), "not Bool"),
        (
            "fd.ops.cast(tv0, dtype=DataType.Float8_e4m3fn)",
            (torch.ones(2).int(),),
            "no cast from Int32",
        ),
        (
            "fd.ops.cast(tv0, dtype=DataType.UInt64)",
            (torch.ones(2).int(),),
            "no meaning for the dtype UInt64",
        ),
        (
            "fd.ops.sum(tv0, dims=[0], dtype=DataType.Float)",
            (torch.ones(2).bfloat16(),),
            "BFloat16 tensor",
        ),
        ("fd.ops.squeeze(tv0, dims=[0])", (torch.ones(2),), "squeeze of dimension 0"),
        ("fd.ops.expand(tv0, shape=[4])", (torch.ones(2),), "expand of"),
        ("fd.ops.reshape(tv0, new_shape=[3])", (torch.ones(2),), "reshape of"),
        ("fd.ops.select(tv0, 2, dim=0)", (torch.ones(2),), "out of range"),
        ("fd.ops.gather(tv0, tv1, dim=0)", (torch.ones(2), torch.tensor([-1])), "negative index"),
        (
            "fd.ops.scatter(tv0, tv1, tv2, dim=0)",
            (torch.ones(2), torch.tensor([1, 1]), torch.tensor([3.0, 4.0])),
            "two values",
        ),
        ("fd.ops.div(tv0, tv1)", (torch.ones(2).int(), torch.zeros(2).int()), "ZeroDivisionError"),
    ],
)
def test_refused_with_the_line(line, inputs, message):
    with pytest.raises(Refused, match=message) as error:
        run(line, *inputs)
    assert f"in: tv9 = {line}" in str(error.value)


def test_inputs_are_what_the_definition_says():
    text = text_of(tensor_line("tv0", [-1, 4], "Float"), "fd.add_output(tv0)")
    interpret(text, [torch.ones(0, 4)])
    for x, message in (
        (torch.ones(3, 5), "expected .-1, 4."),
        (torch.ones(3), "expected 2 dimensions"),
        (torch.ones(3, 4).double(), "expected torch.float32"),
        (torch.ones(4, 3).T, "strides"),
        (7, "expected a tensor"),
    ):
        with pytest.raises(Refused, match=message):
            interpret(text, [x])
    with pytest.raises(Refused, match="1 inputs fewer"):
        interpret(text, [torch.ones(3, 4), 5])
    with pytest.raises(Refused, match="expected a tensor"):
        interpret(text, [])


# Against the real nvFuser -------------------------------------------------------------------------


def agreement(build, *inputs):
    """Of nvFuser and the interpreter about the dtypes of the outputs. "undefined": nvFuser refuses
    the definition; "refused": the interpreter refuses to compute with a dtype for which nvFuser
    printed no cast.
    """
    try:
        fd = defined(build, *inputs)
    except RuntimeError:
        return "undefined"
    try:
        got = output_dtypes(str(fd), inputs)
    except Refused as error:
        return (
            "refused"
            if "cast first" in str(error) or "cast to Float first" in str(error)
            else str(error)
        )
    return "agreed" if round_trip(fd) == got else f"{got}:\n{fd}"


OPERANDS = [
    dtype for dtype in DTYPES if dtype.itemsize != 1 or dtype in (torch.bool, torch.float8_e4m3fn)
]
# printed, but no function of nvfuser_direct
IN_NVFUSER = [row for row in POINTWISE.values() if row.name != "ceilDiv"]


def ones(dtype):
    return torch.ones(4, 6).to(dtype)


@nvfuser
@pytest.mark.parametrize(
    "row", [row for row in IN_NVFUSER if row.operands == 1], ids=lambda row: row.name
)
def test_dtypes_of_unary_operations(row, capsys):
    results = {
        DTYPES[dtype]: agreement(lambda fd, x: getattr(fd.ops, row.name)(x), ones(dtype))
        for dtype in OPERANDS
    }
    assert set(results.values()) <= {"agreed", "refused", "undefined"}
    assert {results[dtype] for dtype in row.dtypes if dtype != "Index"} == {"agreed"}


@nvfuser
@pytest.mark.parametrize(
    "name", [*(row.name for row in IN_NVFUSER if row.operands == 2), "truediv", "where"]
)
def test_dtypes_of_binary_operations(name, capsys):
    """Of two tensors, and of a tensor and a number, for all pairs of dtypes."""

    def build(fd, x, y, *condition):
        return getattr(fd.ops, name)(*condition, x, y)

    condition = (ones(torch.bool),) if name == "where" else ()
    results = {
        (DTYPES[a], DTYPES[b]): agreement(build, ones(a), ones(b), *condition)
        for a, b in product(OPERANDS, OPERANDS)
    }
    for a, number in product(OPERANDS, (2, 0.5)):
        results[DTYPES[a], number] = agreement(
            lambda fd, x, *c, number=number: build(fd, x, number, *c), ones(a), *condition
        )
        results[number, DTYPES[a]] = agreement(
            lambda fd, x, *c, number=number: build(fd, number, x, *c), ones(a), *condition
        )
    assert set(results.values()) <= {"agreed", "refused", "undefined"}
    dtypes = (
        {DTYPES[dtype] for dtype in OPERANDS}
        if name == "where"
        else set(POINTWISE.get(name, POINTWISE["div"]).dtypes) - {"Index"}
    )
    assert {results[dtype, dtype] for dtype in dtypes} == {"agreed"}


@nvfuser
def test_dtypes_of_casts(capsys):
    targets = [E2M1, *(name for name in DTYPES.values() if name != "Float4_e2m1fn_x2")]
    for source, target in product(OPERANDS, targets):
        result = agreement(
            lambda fd, x, target=target: fd.ops.cast(x, dtype=_dtype(target)), ones(source)
        )
        whole = source not in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        want = "agreed"
        if target == "Float8_e8m0fnu" and source in (torch.float64, torch.bfloat16, torch.float16):
            want = "refused"
        if (target in (E2M1, E4M3, "Float8_e8m0fnu") and whole) or (
            source == torch.float8_e4m3fn and target in ("Int", "Int32", "Bool")
        ):
            want = "agreed" if DTYPES[source] == target else "undefined"
        assert result == want, (source, target)
        if want == "undefined":
            with pytest.raises(Refused, match="nvFuser has no cast"):
                run(f"fd.ops.cast(tv0, dtype=DataType.{target})", ones(source))


X, Y, ROW, FLAGS = (
    sample(torch.float32),
    sample(torch.float32).flip(0),
    sample(torch.float32, (6,)),
    sample(torch.bool),
)
WHOLE, AT = sample(torch.int32), torch.tensor([[3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 1, 0]])


def _case(name, build, *inputs, want):
    return pytest.param(build, inputs, want, id=name)


def _scalar(fd, value, dtype="Int"):
    import nvfuser_direct

    return fd.define_scalar(value, dtype=getattr(nvfuser_direct.DataType, dtype))


def _dtype(name):
    import nvfuser_direct

    return getattr(nvfuser_direct.DataType, name)


CASES = [
    _case("reshape", lambda fd, x: fd.ops.reshape(x, [-1, 2, 3]), X, want=[X.reshape(4, 2, 3)]),
    _case("permute", lambda fd, x: fd.ops.permute(x, [1, 0]), X, want=[X.T]),
    _case("broadcast", lambda fd, x: fd.ops.broadcast(x, [True, False]), ROW, want=[ROW[None]]),
    _case(
        "broadcast_in_dim",
        lambda fd, x: fd.ops.broadcast_in_dim(x, shape=[6, 5], broadcast_dims=[0]),
        ROW,
        want=[ROW[:, None].expand(6, 5)],
    ),
    _case("rows", lambda fd, x, y: fd.ops.add(x, y), X, ROW, want=[X + ROW]),
    _case("squeeze", lambda fd, x: fd.ops.squeeze(x, [0]), ROW[None], want=[ROW]),
    _case("slice", lambda fd, x: fd.ops.slice(x, [1, 0], [3, 5]), X, want=[X[1:3, :5]]),
    _case("slice past the end", lambda fd, x: fd.ops.slice(x, [2, 0], [9, 6]), X, want=[X[2:]]),
    _case(
        "pad",
        lambda fd, x: fd.ops.pad(x, [1, 2, 0, -1], -1.0),
        X,
        want=[torch.nn.functional.pad(X, [1, 2, 0, -1], value=-1.0)],
    ),
    _case(
        "pad integers",
        lambda fd, x: fd.ops.pad(x, [1, 0]),
        WHOLE,
        want=[torch.nn.functional.pad(WHOLE, [1, 0])],
    ),
    _case(
        "cat",
        lambda fd, x, y: fd.ops.cat([x, y, x], 1),
        -X * 0,
        Y[:, :2].clone(),
        want=[torch.cat([-X * 0, Y[:, :2], -X * 0], 1)],
    ),
    _case(
        "cat integers",
        lambda fd, x: fd.ops.cat([x, x], -1),
        WHOLE,
        want=[torch.cat([WHOLE, WHOLE], 1)],
    ),
    _case(
        "full",
        lambda fd: fd.ops.full([2, 3], 0.3, _dtype("BFloat16")),
        want=[torch.full((2, 3), 0.3).bfloat16()],
    ),
    _case(
        "iota",
        lambda fd: fd.ops.iota(5, 3, 2, dtype=_dtype("Int32")),
        want=[torch.arange(3, 13, 2).int()],
    ),
    _case("iota from 0", lambda fd, n: fd.ops.iota(n), 4, want=[torch.arange(4)]),
    _case("stride_order", lambda fd, x: fd.ops.stride_order(x, [0, 1]), X, want=[X]),
    _case("set", lambda fd, x: fd.ops.set(x), X, want=[X]),
    _case(
        "size",
        lambda fd, x: fd.ops.full([fd.ops.size(x, 1)], 1, _dtype("Int")),
        X,
        want=[torch.ones(6).long()],
    ),
    _case(
        "shape",
        lambda fd, x: fd.ops.full(fd.ops.shape(x), 1, _dtype("Int")),
        X,
        want=[torch.ones(4, 6).long()],
    ),
    _case("gather", lambda fd, x, at: fd.ops.gather(x, at, 0), X, AT, want=[X.gather(0, AT)]),
    _case(
        "take_along_axis",
        lambda fd, x, at: fd.ops.take_along_axis(x, at, 0),
        X,
        AT,
        want=[X.gather(0, AT)],
    ),
    _case(
        "scatter",
        lambda fd, x, at, y: fd.ops.scatter(x, at, y, 0),
        X,
        AT[:1],
        Y[:1].clone(),
        want=[X.scatter(0, AT[:1], Y[:1])],
    ),
    _case(
        "scatter a number",
        lambda fd, x, at: fd.ops.scatter(x, at, _scalar(fd, 7.0, "Double"), 0),
        X,
        AT,
        want=[X.scatter(0, AT, 7.0)],
    ),
    _case(
        "index_select",
        lambda fd, x, at: fd.ops.index_select(x, at, 1),
        X,
        AT[0].int(),
        want=[X[:, AT[0]]],
    ),
    _case(
        "index_select one",
        lambda fd, x, at: fd.ops.index_select(x, at, 0),
        X,
        torch.tensor(2),
        want=[X[2:3]],
    ),
    _case("select", lambda fd, x, i: fd.ops.select(x, i, 1), X, 4, want=[X[:, 4]]),
    _case(
        "select a constant", lambda fd, x: fd.ops.select(x, _scalar(fd, 4), 1), X, want=[X[:, 4]]
    ),
    _case("sum", lambda fd, x: fd.ops.sum(x, [1], keepdim=True), X, want=[X.sum(1, keepdim=True)]),
    _case("sum all", lambda fd, x: fd.ops.sum(x), WHOLE, want=[WHOLE.sum()]),
    _case(
        "sum in Float",
        lambda fd, x: fd.ops.sum(x, [0], dtype=_dtype("Float")),
        X.bfloat16(),
        want=[X.sum(0)],
    ),
    _case("sum of a size 1", lambda fd, x: fd.ops.sum(x, [0]), ROW[None], want=[ROW]),
    _case(
        "sum of repeated elements",
        lambda fd, x: fd.ops.sum(fd.ops.broadcast_in_dim(x, shape=[6, 5], broadcast_dims=[0]), [1]),
        ROW,
        want=[ROW * 5],
    ),
    _case("prod", lambda fd, x: fd.ops.prod(x, [0]), ROW, want=[ROW.prod()]),
    _case("max", lambda fd, x: fd.ops.max(x, [0, 1]), X.bfloat16(), want=[X.max().bfloat16()]),
    _case(
        "min",
        lambda fd, x: fd.ops.min(x, [-1], keepdim=True),
        WHOLE,
        want=[WHOLE.amin(1, keepdim=True)],
    ),
    _case("cumsum", lambda fd, x: fd.ops.cumsum(x, -1), WHOLE, want=[WHOLE.cumsum(1).int()]),
    _case(
        "cumprod", lambda fd, x: fd.ops.cumprod(x, 0), ROW, want=[ROW.double().cumprod(0).float()]
    ),
    _case("cummax", lambda fd, x: fd.ops.cummax(x, 0), Y, want=[Y.cummax(0).values]),
    _case("cummin", lambda fd, x: fd.ops.cummin(x, 0), WHOLE, want=[WHOLE.cummin(0).values]),
    _case(
        "argsort",
        lambda fd, x: fd.ops.argsort(x, -1, descending=True, stable=True),
        WHOLE % 4,
        want=[torch.argsort(WHOLE % 4, dim=1, descending=True, stable=True)],
    ),
    _case(
        "topk",
        lambda fd, x: fd.ops.topk(x, _scalar(fd, 2), 0, sorted=True),
        Y,
        want=list(Y.topk(2, 0)),
    ),
    _case(
        "least",
        lambda fd, x: fd.ops.topk(x, _scalar(fd, 3), largest=False),
        ROW,
        want=[ROW[:3], torch.arange(3)],
    ),
    _case(
        "where",
        lambda fd, c, x: fd.ops.where(c, x, 0.0),
        FLAGS,
        X.bfloat16(),
        want=[torch.where(FLAGS, X, 0).bfloat16()],
    ),
    _case(
        "where of Bool",
        lambda fd, c: fd.ops.where(c, c, _scalar(fd, False, "Bool")),
        FLAGS,
        want=[FLAGS],
    ),
    _case("clamp", lambda fd, x: fd.ops.clamp(x, -7, 1.5), X, want=[X.clamp(-7, 1.5)]),
    _case("clamp above", lambda fd, x: fd.ops.clamp(x, None, 7), WHOLE, want=[WHOLE.clamp(max=7)]),
    _case("addcmul", lambda fd, x: fd.ops.addcmul(x, x, x, 0.5), X, want=[X + 0.5 * X * X]),
    _case("sign", lambda fd, x: fd.ops.sign(x), X - 1, want=[(X - 1).sign()]),
    _case("triu", lambda fd, x: fd.ops.triu(x, 1), X, want=[X.triu(1)]),
    _case("truediv", lambda fd, x: fd.ops.truediv(x, 3), WHOLE, want=[WHOLE / 3]),
    _case("bitwise_not", lambda fd, c: fd.ops.bitwise_not(c), FLAGS, want=[~FLAGS]),
    _case(
        "logical_right_shift",
        lambda fd, x: fd.ops.logical_right_shift(x, 28),
        -WHOLE,
        want=[torch.full((4, 6), 15).int()],
    ),
    _case(
        "shift by nothing", lambda fd, x: fd.ops.logical_right_shift(x, 0), -WHOLE, want=[-WHOLE]
    ),
    _case(
        "matmul",
        lambda fd, x, y: fd.ops.matmul(x, y),
        X.bfloat16(),
        X.T.contiguous().bfloat16(),
        want=[(X @ X.T).bfloat16()],
    ),
    _case(
        "linear",
        lambda fd, x, w, b: fd.ops.linear(x, w, b),
        X,
        X,
        X[:, 0].clone(),
        want=[X @ X.T + X[:, 0]],
    ),
    _case(
        "linear without a bias",
        lambda fd, x, w: fd.ops.linear(x, w),
        X.half(),
        X.half(),
        want=[(X @ X.T).half()],
    ),
    _case(
        "e4m3",
        lambda fd, x: fd.ops.cast(x, dtype=_dtype(E4M3)),
        X * 200,
        want=[(X * 200).clamp(max=448).to(torch.float8_e4m3fn)],
    ),
]


@nvfuser
@pytest.mark.parametrize(("build", "inputs", "want"), CASES)
def test_computes_what_torch_does(build, inputs, want):
    for got, expected in zip(computed(build, *inputs), want, strict=True):
        same(got, expected)


@nvfuser
@pytest.mark.parametrize("row", IN_NVFUSER, ids=lambda row: row.name)
def test_pointwise_operations_compute_what_torch_does(row):
    """As far as torch has the operation under that name, and means the same."""
    reference = {
        "silu": torch.nn.functional.silu,
        "pow": torch.pow,
        "mod": torch.fmod,
        "maximum": torch.maximum,
        "clamp": None,
    }
    function = reference.get(row.name, getattr(torch, row.name, None))
    if row.name == "div" or function is None:
        return
    inputs = [
        sample(getattr(torch, {"Float": "float32", "Int": "int64", "Bool": "bool"}[row.dtypes[0]]))
        for _ in range(row.operands)
    ]
    (got,) = computed(lambda fd, *args: getattr(fd.ops, row.name)(*args), *inputs)
    torch.testing.assert_close(got, function(*inputs), rtol=1e-6, atol=1e-6)


def test_every_operation_is_tested():
    names = {param.id for param in CASES}
    elsewhere = {
        "cast",
        "expand",
        "nv_block_quantize",
        "nv_grouped_block_quantize",
        "preprocess_grouped_matmul_input_sf",
    }
    assert set(OPS) - names - set(POINTWISE) - elsewhere == {
        "grouped_mm",
        "cutlass_nvfp4_grouped_mm",
    }


@nvfuser
def test_strides_of_inputs():
    """contiguity and stride_order as nvFuser derives them from a tensor's sizes and strides are
    understood.
    """
    from nvfuser_direct import DataType, FusionDefinition

    whole = torch.randn(4, 6, 10)
    for x in (
        whole,
        whole.transpose(1, 2),
        whole[:, ::2],
        whole[..., ::2],
        whole.permute(2, 0, 1),
        whole[:, :1],
        whole[:1],
        whole[:, :, :1].mT,
    ):
        with FusionDefinition() as fd:
            fd.add_output(
                fd.ops.set(
                    fd.define_tensor(
                        sizes=list(x.shape), strides=list(x.stride()), dtype=DataType.Float
                    )
                )
            )
        same(interpret(str(fd), [x])[0], x)
    with FusionDefinition() as fd:
        fd.add_output(
            fd.ops.set(
                fd.define_tensor(sizes=[4, 10, 6], strides=[60, 1, 10], dtype=DataType.Float)
            )
        )
    with pytest.raises(Refused, match="strides"):
        interpret(str(fd), [torch.randn(4, 10, 6)])


@nvfuser
@pytest.mark.parametrize("m", [0, 1, 5])
def test_sizes_that_only_the_call_knows(m):
    from nvfuser_direct import DataType, FusionDefinition

    with FusionDefinition() as fd:
        rows = fd.define_scalar(None, dtype=DataType.Int)
        x = fd.define_tensor(shape=[-1, 6], contiguity=True, dtype=DataType.Float)
        y = fd.define_tensor(shape=[-1, 6], contiguity=True, dtype=DataType.Float)
        fd.add_output(fd.ops.reshape(x, [rows, 2, 3]))
        fd.add_output(fd.ops.cat([x, y], 0))
        fd.add_output(fd.ops.reshape(x, [fd.ops.mul(fd.ops.size(x, 0), 2), 3]))
        fd.add_output(fd.ops.iota(fd.ops.div(fd.ops.add(rows, 127), 128)))
        fd.add_output(fd.ops.slice(x, [0, 1], [fd.ops.size(x, 0), 3]))
    assert round_trip(fd) == ["Float", "Float", "Float", "Int", "Float"]
    x, y = torch.randn(m, 6), torch.randn(3, 6)
    want = [
        x.reshape(m, 2, 3),
        torch.cat([x, y]),
        x.reshape(2 * m, 3),
        torch.arange(1 if m else 0),
        x[:, 1:3],
    ]
    for got, expected in zip(interpret(str(fd), [m, x, y]), want, strict=True):
        same(got, expected)


# What the text keeps of constants -----------------------------------------------------------------


@nvfuser
@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (2688.0, "2688.00"),
        (0.3, "0.300000"),
        (-0.0, "-0.00000"),
        (math.inf, 'float("inf")'),
        (-math.inf, 'float("-inf")'),
        (math.nan, 'float("nan")'),
        (2.0**-8, "0.00390625"),
        (2.0**-10, "0.000976562"),  # is 0.0009765625
        (1 / 448, "0.00223214"),
        (16777217.0, "1.67772e+07"),
        (2.0**40, "1.09951e+12"),
    ],
)
def test_floats_are_printed_with_six_digits(value, printed):
    fd = defined(lambda fd, x: fd.ops.mul(x, value), X.double())
    assert f"fd.ops.mul(tv0, {printed})" in str(fd)
    same(interpret(str(fd), [X.double()])[0], X.double() * eval(printed))


@nvfuser
def test_integers_are_printed_whole():
    for value in (2**62 + 1, -(2**40) - 1):
        fd = defined(lambda fd, x, value=value: fd.ops.bitwise_xor(x, value), WHOLE.long())
        assert f"(tv0, {value})" in str(fd)
    # with a float tensor an integer is cast, exactly where float32 holds it
    (got,) = computed(lambda fd, x: fd.ops.mul(x, 16777215), torch.ones(3))
    same(got, torch.full((3,), 16777215.0))


@nvfuser
@pytest.mark.parametrize(
    "value", [0.1, 1 / 448, 1 / 2688, 2.0**-10, 1.702, -3.4028234663852886e38, 1e-20, math.pi]
)
def test_a_quotient_of_integers_says_any_float32(value):
    """What a definition can do to have its constants printed exactly."""
    from nvfuser_direct import DataType

    exact = torch.tensor(value).item()
    mantissa, exponent = math.frexp(exact)
    steps = [2 ** min(62, abs(exponent - 24) - i) for i in range(0, abs(exponent - 24), 62)]

    def build(fd, x):
        constant = fd.ops.cast(fd.define_scalar(int(mantissa * 2**24)), dtype=DataType.Double)
        for step in steps:
            power = fd.ops.cast(fd.define_scalar(step), dtype=DataType.Double)
            constant = fd.ops.mul(constant, power) if exponent > 24 else fd.ops.div(constant, power)
        return fd.ops.mul(x, constant)

    same(computed(build, torch.ones(1))[0], torch.tensor([exact]))


# What the text loses ------------------------------------------------------------------------------


def cutlass(fd, a, b, scales_a, scales_b, alpha, problem_sizes, first_rows, first_padded, **kwargs):
    scales = fd.ops.preprocess_grouped_matmul_input_sf(scales_a, first_rows, first_padded)
    return fd.ops.cutlass_nvfp4_grouped_mm(
        a, b, scales, scales_b, alpha, problem_sizes, first_rows, first_padded, **kwargs
    )


@nvfuser
def test_the_dtype_of_the_cutlass_product_is_not_printed():
    from nvfuser_direct import DataType

    inputs, want = nvfp4_problem([2, 0, 3], k=128)
    inputs = [x.view(torch.float4_e2m1fn_x2) if x.dtype == torch.uint8 else x for x in inputs]
    (got,) = computed(cutlass, *inputs)
    same(got, want.bfloat16())
    fd = defined(lambda *args: cutlass(*args, dtype=DataType.Half), *inputs)
    assert round_trip(fd) == ["Half"] != output_dtypes(str(fd), inputs)
    assert [o.dtype().name for o in rebuilt(str(fd)).fusion.outputs()] == ["BFloat16"]
    assert output_dtypes(str(fd), inputs, cutlass_dtype="Half") == ["Half"]


@nvfuser
def test_round_trip_fails_where_the_text_means_something_else():
    fd = defined(lambda fd, x: fd.ops.stride_order(x, [1, 0]), X)  # printed as [], which means none
    with pytest.raises(AssertionError, match="executed, prints"):
        round_trip(fd)


def test_canonical_text_numbers_names_in_order():
    a = text_of(
        "c0 = fd.define_scalar(None, dtype=DataType.Int)",
        "c9 = fd.ops.cast(c0, dtype=DataType.Index)",
        "tv3 = fd.ops.iota(length=c9)",
    )
    b = text_of("c4 = fd.define_scalar(None, dtype=DataType.Int)", "tv7 = fd.ops.iota(length=c4)")
    assert canonical(a) == canonical(b)


# Whole chains -------------------------------------------------------------------------------------


@nvfuser
def test_dequantizes_words_and_multiplies():
    """Codes in int32 words, e4m3 scales, a global scale, rounded to BFloat16, then a grouped
    product.
    """
    from nvfuser_direct import DataType

    count, n, k, sizes = 3, 16, 32, [2, 0, 3]
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (count, n, k // 2), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(count, n, k // 16, generator=generator) * 4).to(torch.float8_e4m3fn)
    factor, x = (
        torch.rand(count, generator=generator),
        torch.randn(sum(sizes), k, generator=generator).bfloat16(),
    )
    ends = torch.tensor(sizes).cumsum(0).int()

    def build(fd, x, words, scales, factor, ends):
        shape = [count, n, k // 8, 8]
        shifts = fd.ops.mul(fd.ops.iota(8, dtype=DataType.Int32), 4)
        spread = fd.ops.broadcast_in_dim(words, shape=shape, broadcast_dims=[0, 1, 2])
        code = fd.ops.bitwise_and(
            fd.ops.bitwise_right_shift(
                spread, fd.ops.broadcast_in_dim(shifts, shape=shape, broadcast_dims=[3])
            ),
            15,
        )
        low = fd.ops.bitwise_and(code, 7)
        exponent, mantissa = fd.ops.bitwise_right_shift(low, 1), fd.ops.bitwise_and(low, 1)
        power = fd.ops.bitwise_left_shift(
            fd.ops.add(mantissa, 2), fd.ops.sub(fd.ops.maximum(exponent, 1), 1)
        )
        quarters = fd.ops.where(fd.ops.eq(exponent, 0), mantissa, power)  # twice the magnitude
        signed = fd.ops.where(fd.ops.ge(code, 8), fd.ops.neg(quarters), quarters)
        value = fd.ops.mul(
            fd.ops.cast(fd.ops.reshape(signed, [count, n, k // 16, 16]), dtype=DataType.Float), 0.5
        )
        scale = fd.ops.mul(
            fd.ops.cast(scales, dtype=DataType.Float),
            fd.ops.broadcast_in_dim(factor, shape=[count, n, k // 16], broadcast_dims=[0]),
        )
        weight = fd.ops.mul(value, fd.ops.broadcast(scale, [False, False, False, True]))
        weight = fd.ops.cast(fd.ops.reshape(weight, [count, n, k]), dtype=DataType.BFloat16)
        return weight, fd.ops.grouped_mm(x, fd.ops.permute(weight, [0, 2, 1]), ends)

    weight, product_ = computed(build, x, codes.view(torch.int32), scales, factor, ends)
    want = dequantized(codes, scales.float() * factor[:, None, None]).bfloat16()
    assert torch.equal(weight, want)  # but for the sign of zeros, which these integers do not have
    rows = torch.cat([x[:2].double() @ want[0].double().T, x[2:].double() @ want[2].double().T])
    same(product_, rows.bfloat16())


@nvfuser
@pytest.mark.parametrize("grouped", [False, True])
def test_quantizes_swizzles_and_multiplies(grouped):
    sizes, k = [130, 0, 3], 64
    (_, b, _, scales_b, alpha, problem_sizes, first_rows, first_padded), _ = nvfp4_problem(sizes, k)
    x = torch.randn(sum(sizes), k).bfloat16()
    encode = 2688 / x.float().abs().max()

    def build(fd, x, encode, b, scales_b, alpha, problem_sizes, first_rows, first_padded):
        if grouped:
            codes, scales = fd.ops.nv_grouped_block_quantize(x, first_rows, first_padded, encode)
        else:
            codes, linear = fd.ops.nv_block_quantize(x, encode)
            scales = fd.ops.preprocess_grouped_matmul_input_sf(linear, first_rows, first_padded)
        return fd.ops.cutlass_nvfp4_grouped_mm(
            codes, b, scales, scales_b, alpha, problem_sizes, first_rows, first_padded
        )

    (got,) = computed(
        build,
        x,
        encode,
        b.view(torch.float4_e2m1fn_x2),
        scales_b,
        alpha,
        problem_sizes,
        first_rows,
        first_padded,
    )
    packed, scales = run(
        "fd.ops.nv_block_quantize(tv0, global_scale=tv1)", x, encode, result="tv8, tv9"
    )
    left = dequantized(packed, scales).double()
    right = dequantized(
        b.transpose(1, 2),
        torch.stack([unswizzle(s.float().flatten(), 0, 128, k // 16) for s in scales_b]),
    ).double()
    want = torch.cat(
        [left[:130] @ right[0].T * alpha[0].double(), left[130:] @ right[2].T * alpha[2].double()]
    )
    same(got, want.bfloat16())


@nvfuser
def test_a_scalar_that_nothing_uses():
    """nvFuser prints the sizes of quantized tensors as scalars of their own."""

    def build(fd, x, first_rows, first_padded):
        codes, scales = fd.ops.nv_block_quantize(x)
        return codes, fd.ops.preprocess_grouped_matmul_input_sf(scales, first_rows, first_padded)

    x = torch.randn(5, 64)
    fd = defined(build, x, *starts_of([2, 3]))
    assert "= fd.ops.div(64, 16)" in str(fd)
    assert round_trip(fd) == [E2M1, E4M3] == output_dtypes(str(fd), [x, *starts_of([2, 3])])
