"""The operation with another library's signature: what it computes, what it refuses, and who has
the name that the other library calls.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import loops
import pytest
import test_ops
import torch
from bad_calls import messages
from hypothesis import given, strategies as st
from routings import Partition, partitions
from test_ops import problem
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._library import custom_ops
from ways import HOW, compiled, every_way

from fusion_moe import compat, options
from fusion_moe.definitions import translate
from fusion_moe.errors import (
    OptionError,
    ShapeError,
)

OURS = torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
NAN = float("nan")


def weight(
    groups: int, n: int, k: int, padding: int = 0x7F, seed: int = 0
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The operation's three tensors of a weight, padding of the scales NaN, and what they mean:
    f64[G, N, K].
    """
    codes, scale, decode = test_ops.weight(groups, n, k, seed=seed)
    fp4 = codes.view(torch.float4_e2m1fn_x2).transpose(1, 2)
    return (fp4, loops.swizzled(scale, padding), decode), loops.decoded(codes, scale, decode)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def call(*args: Tensor) -> Tensor:
    return OURS(*args)


def assert_right(
    found: Tensor, x: Tensor, w: Tensor, sizes: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """Off the loop in float64 by one rounding to the dtype of x, or the given one, and some of
    float32 sums.
    """
    dtype = dtype or x.dtype
    wide = x.double().reshape(-1, x.shape[-1]).nan_to_num()
    want, magnitude = loops.product(wide, w, sizes), loops.product(wide.abs(), w.abs(), sizes)
    assert found.dtype == dtype
    assert found.shape == (*x.shape[:-1], w.shape[1])
    off = (found.double().reshape(want.shape) - want).abs()
    assert (
        off <= EPS[dtype] * want.abs() + 2.0**-20 * magnitude + torch.finfo(dtype).smallest_normal
    ).all()


# What it computes ---------------------------------------------------------------------------------


@given(partitions(), st.sampled_from(list(EPS)), st.sampled_from(((6, 32), (128, 64), (130, 80))))
def test_against_a_loop(partition: Partition, dtype, nk):
    parts, w = weight(len(partition.sizes), *nk)
    x = random(partition.rows, nk[1], dtype=dtype)
    x[sum(partition.sizes) :] = NAN
    found = OURS(x, *parts, *problem(partition.sizes, *nk))
    assert_right(found, x, w, partition.sizes)
    assert not found[sum(partition.sizes) :].any()


@every_way
@pytest.mark.parametrize("sizes", [(3, 0, 6, 2), (11,)])
def test_all_ways_agree(how, sizes):
    parts, w = weight(len(sizes), 48, 64)
    run = HOW[how](call)
    for lead in ((sum(sizes),), (1, sum(sizes))):  # rows in one dimension and in two
        x = random(*lead, 64)
        with torch.no_grad():
            assert_right(run(x, *parts, *problem(sizes, 48, 64)), x, w, sizes)


def test_the_fake_has_the_dtype_of_the_activation():
    parts, _ = weight(4, 48, 64)
    for dtype in EPS:
        args = (random(2, 5, 64, dtype=dtype), *parts, *problem((3, 0, 6, 1), 48, 64))
        fake = OURS(*(t.to("meta") for t in args))
        assert (fake.shape, fake.dtype) == ((2, 5, 48), dtype)


# 4-bit activations --------------------------------------------------------------------------------


def quantized(x: Tensor) -> Tensor:
    """x f32[M, K] -> f64[M, K]: the values of the rows in NVFP4, as docs/formats.md says, a block
    at a time.
    """
    decode = x.abs().max() / torch.tensor(2688.0)
    out, grid = (
        torch.zeros(x.shape, dtype=torch.float64),
        torch.tensor(sorted(set(loops.E2M1)), dtype=torch.float64),
    )
    # codes whose last bit is 0
    even = torch.tensor([abs(v) in (0.0, 1.0, 2.0, 4.0) for v in grid.tolist()])
    for row, at in itertools.product(range(len(x)), range(0, x.shape[1], 16)):
        block = x[row, at : at + 16]
        if not block.any():
            continue
        scale = (
            (block.abs().max() / (decode * 6)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
        )
        step = scale * decode
        off = ((block / step).double()[:, None] - grid).abs()
        nearest = off == off.min(1, keepdim=True).values
        tie = nearest & even
        code = grid[torch.where(nearest.sum(1) > 1, tie.int().argmax(1), nearest.int().argmax(1))]
        out[row, at : at + 16] = (code.float() * step).double()
    return out


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("sizes", [(3, 0, 6, 2), (0, 0, 0, 11), (1, 2, 0, 0), (0, 0, 0, 0), (11,)])
def test_quantized_activations_are_the_documented_formula(sizes, dtype):
    """Rows of no group are zeros, and take no part in the decode scale of the others."""
    parts, w = weight(len(sizes), 48, 64)
    x, used = random(14, 64, dtype=dtype), sum(sizes)
    x[0, :16], x[used:] = 0.0, NAN  # a block of zeros
    with options.override(target="reference"):
        found = OURS(x, *parts, *problem(sizes, 48, 64), activation_format="nvfp4")
    near = quantized(x[:used].float()) if used else x[:0].double()
    assert_right(
        found, torch.cat([near, torch.zeros(14 - used, 64, dtype=torch.float64)]), w, sizes, dtype
    )
    assert not found[used:].any()


# Memory of weights --------------------------------------------------------------------------------


class Held(torch.nn.Module):
    """A module that holds its codes as the operation takes them, or as they are stored."""

    def __init__(self, as_stored: bool):
        super().__init__()
        (fp4, scale, decode), _ = weight(4, 48, 64)
        self.as_stored = as_stored
        for name, t in {
            "fp4": fp4.transpose(1, 2) if as_stored else fp4,
            "scale": scale,
            "decode": decode,
        }.items():
            self.register_buffer(name, t)

    def forward(self, x, *of):
        fp4 = self.fp4.transpose(1, 2) if self.as_stored else self.fp4
        return torch.nn.functional.silu(OURS(x, fp4, self.scale, self.decode, *of))


@pytest.mark.parametrize("as_stored", [False, True])
def test_no_byte_of_a_weight_is_moved(as_stored, monkeypatch):
    """torch.compile hands the buffers to the fusion as they are: its code allocates nothing and
    calls nothing else.
    """
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    model, args = Held(as_stored), (random(11, 64), *problem((3, 0, 6, 2), 48, 64))
    with torch.no_grad():
        found, (code,) = run_and_get_code(compiled(model), *args)
        torch.testing.assert_close(found, model(*args), rtol=2.0**-6, atol=1e-6)
    body = code[code.index("def call(") : code.index("return (")]
    assert body.count("torch.ops.fusion_moe.run.default(") == 1
    assert not [
        what
        for what in ("empty_strided_cpu(", "cpp_fused", "aten.clone", "aten.copy_")
        if what in body
    ]


# What it refuses ----------------------------------------------------------------------------------


def bad_calls() -> dict[str, Callable[[], Any]]:
    """What is wrong -> the call."""
    parts, _ = weight(4, 48, 64)
    names = (
        "activation",
        "fp4_weight",
        "weight_scaling_factor",
        "global_scale",
        "offsets",
        "blockscale_offsets",
        "problem_sizes",
    )
    good = dict(zip(names, (random(11, 64), *parts, *problem((3, 0, 6, 2), 48, 64)), strict=True))
    codes, sizes = good["fp4_weight"].view(torch.uint8), good["problem_sizes"]

    def but(**changes):
        return lambda: OURS(**{**good, **changes})

    def with_size(group, column, to):
        changed = sizes.clone()
        changed[group, column] = to
        return but(problem_sizes=changed)

    ints = lambda *v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
    return {
        "codes packed along N": but(fp4_weight=codes.contiguous()),
        "codes not transposed": but(fp4_weight=codes.mT),
        "codes of a slice": but(fp4_weight=torch.cat([codes.mT, codes.mT], -1)[..., :32].mT),
        "codes of one matrix": but(fp4_weight=codes[0]),
        "K of another size": but(activation=random(11, 80)),
        "scales that lost their padding": but(weight_scaling_factor=parts[1][:, :48]),
        "scales in bf16": but(weight_scaling_factor=parts[1].bfloat16()),
        "one global scale": but(global_scale=torch.ones(())),
        "global scales in bf16": but(global_scale=parts[2].bfloat16()),
        "offsets with the total": but(offsets=ints(0, 3, 3, 9, 11)),
        "offsets without the last group": but(offsets=ints(0, 3, 3)),
        "offsets are ends": but(offsets=ints(3, 3, 9, 11)),
        "offsets are int64": but(offsets=good["offsets"].long()),
        "blockscale_offsets are not padded": but(blockscale_offsets=good["offsets"]),
        "problem_sizes for three groups": but(problem_sizes=sizes[:3]),
        "problem_sizes shifted by one": but(problem_sizes=sizes.roll(1, 0)),
        "a group that is too large": with_size(3, 0, 3),
        "a group of negative size": with_size(1, 0, -1),
        "N and K in the wrong order": but(problem_sizes=sizes[:, [0, 2, 1]]),
        "integers": but(activation=torch.ones(11, 64, dtype=torch.int32)),
        "4-bit activations on a CPU": but(activation_format="nvfp4"),
        "an unknown activation format": but(activation_format="fp4"),
        "two devices": but(offsets=good["offsets"].to("meta")),
    }


def test_messages(golden):
    golden(messages(bad_calls()))


def test_strides_are_looked_at_while_tracing():
    parts, _ = weight(4, 48, 64)
    rest = problem((3, 0, 6, 2), 48, 64)
    with pytest.raises(
        ShapeError,
        match=r"strides \[1536, 48, 1\]; expected strides \[1536, 1, "
        r"32\], K running fastest",
    ):
        OURS(
            random(11, 64).to("meta"),
            parts[0].view(torch.uint8).contiguous().to("meta"),
            *(t.to("meta") for t in (*parts[1:], *rest)),
        )


# The other library's name -------------------------------------------------------------------------


@pytest.fixture
def clean() -> Iterator[None]:
    """Nobody has the name before a test, nor after it."""
    _release()
    yield
    _release()


def _release() -> None:
    translate.unregister(compat.NAME)
    lib = custom_ops.OPDEF_TO_LIB.pop(compat.NAME, None)
    if lib is not None:
        lib._destroy()


def others() -> Any:
    """Somebody else's registration of the name."""

    @torch.library.custom_op(compat.NAME, mutates_args=())
    def their_own(
        activation: Tensor,
        fp4_weight: Tensor,
        weight_scaling_factor: Tensor,
        weight_global_scale: Tensor,
        offsets: Tensor,
        blockscale_offsets: Tensor,
        problem_sizes: Tensor,
    ) -> Tensor:
        return activation.new_full((*activation.shape[:-1], fp4_weight.shape[-1]), 7)

    their_own.register_fake(lambda x, w, *rest: x.new_empty((*x.shape[:-1], w.shape[-1])))
    return their_own


def theirs(*args: Tensor) -> Tensor:
    return torch.ops.nvf_cutlass.f16a_nvfp4weight_scaled_grouped_mm(*args)


def arguments() -> tuple[Tensor, ...]:
    return (random(11, 64), *weight(4, 48, 64)[0], *problem((3, 0, 6, 2), 48, 64))


@every_way
def test_the_name_is_our_operation(how, clean):
    """The last registration decides; a program that was compiled before is not taken for it."""
    others()
    compat.register_nvf_cutlass()
    run = HOW[how](theirs)
    with torch.no_grad(), options.override(target="reference"):
        assert run(*arguments()).equal(OURS(*arguments()))
        compat.register_nvf_cutlass(activation_format="nvfp4")
        want = OURS(*arguments(), activation_format="nvfp4")
        assert not want.equal(OURS(*arguments()))
        assert HOW[how](theirs)(*arguments()).equal(want)


def test_the_name_is_fused(clean):
    compat.register_nvf_cutlass()
    with torch.no_grad():
        found, (code, *_) = run_and_get_code(compiled(theirs), *arguments())
    assert found.equal(OURS(*arguments()))
    assert "fusion_moe.run" in code


def test_the_name_with_an_unknown_format(clean):
    with pytest.raises(
        OptionError,
        match=r"register_nvf_cutlass: activation_format = 'mxfp4'; "
        r"expected one of bf16, nvfp4",
    ):
        compat.register_nvf_cutlass(activation_format="mxfp4")
    assert compat.NAME not in torch._C._dispatch_get_all_op_names()


def nine(x: Tensor, fp4: Tensor, scale: Tensor, decode: Tensor, *of: Tensor) -> Tensor:
    """The call of thunder 0.2.6: weights as they are stored, and strides that nothing reads."""
    strides = torch.full((len(decode),), 64, dtype=torch.int32)
    return theirs(x, fp4.transpose(1, 2), scale, decode, strides, strides, *of)


@pytest.mark.parametrize(("count", "call"), [(7, theirs), (9, nine)])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_the_name_has_the_derivative_with_each_signature(compile, count, call, clean):
    compat.register_nvf_cutlass(arguments=count)
    args, found = arguments(), []
    for f in (OURS, compiled(call) if compile else call):
        x = args[0].clone().requires_grad_()
        y = f(x, *args[1:])
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad))
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])
    assert found[0][1].any()


def test_the_signature_is_that_of_who_had_the_name(clean):
    compat.register_nvf_cutlass(arguments=9)
    compat.register_nvf_cutlass()
    assert nine(*arguments()).equal(OURS(*arguments()))
    with pytest.raises(OptionError, match="arguments = 8; expected 7, 9 or 0"):
        compat.register_nvf_cutlass(arguments=8)


def test_a_later_one_is_not_fused_as_ours(clean):
    compat.register_nvf_cutlass()
    others()
    assert (theirs(*arguments()) == 7).all()
    with torch.no_grad():
        assert (compiled(theirs)(*arguments()) == 7).all()


@pytest.mark.thunder
def test_the_layer_of_thunder_that_calls_the_name(clean):
    pytest.importorskip("expecttest")
    import thunder

    sys.modules.pop("thunder.benchmarks.layers_for_inference_benchmark", None)
    layers = importlib.import_module("thunder.benchmarks.layers_for_inference_benchmark")
    if len(torch.ops.nvf_cutlass.f16a_nvfp4weight_scaled_grouped_mm.default._schema.arguments) != 7:
        pytest.skip(
            "the layer of thunder 0.2.6 passes nine arguments; make test-thunder has a newer one"
        )
    compat.register_nvf_cutlass()
    sizes, n, k = (1, 0, 3, 1), 128, 64
    parts, w = weight(len(sizes), n, k)
    x, layer = random(sum(sizes), k), layers.NVFP4InferenceGroupedLinear(*parts)
    offsets = torch.tensor([0, 1, 1, 4, 5], dtype=torch.int32)
    with torch.no_grad():
        assert_right(layer(x, offsets), x, w, sizes)
        # Where there is no GPU, thunder's nvFuser executor fails at a cumsum, of which it asks
        # nvFuser's version.
        from fusion_moe.thunder import thunder_executors

        executors = [e for e in thunder_executors() if e.name != "nvfuser"]
        jitted = thunder.jit(layer, executors=executors)
        assert jitted(x, offsets).equal(layer(x, offsets))
    assert any(b.sym.is_fusion for b in thunder.last_traces(jitted)[-1].bound_symbols)
