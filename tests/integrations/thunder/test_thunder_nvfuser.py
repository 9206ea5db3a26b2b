"""Our operations in the regions of thunder's own nvFuser executor: traced for a CUDA device on fake
tensors, no device is needed.

Nothing is launched. The definitions that thunder would launch are real ones; an interpreter of
their text says what they compute.
"""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interpreter import interpret
from torch._subclasses import fake_tensor
from torch.nn import functional as F
from users_operations import library

import fusion_moe
from fusion_moe import errors, translator
from fusion_moe.arch import nearest
from fusion_moe.integrations.nvfuser import headers
from fusion_moe.runtime import cuda
from fusion_moe.runtime.program import Program
from fusion_moe.thunder import thunder_executors

pytestmark = [pytest.mark.thunder, pytest.mark.nvfuser]

O = torch.ops.fusion_moe
# experts, hidden and intermediate size, experts of a token, tokens
G, H, I, K, T = 4, 128, 128, 2, 5


@pytest.fixture
def device(monkeypatch):
    """device(9, 0): from now on torch says that there is one of this compute capability, and that
    nvFuser can compile all for it.

    What would be launched there raises.
    """

    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(cuda, "facts", lambda: nearest(capability))
        monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
        monkeypatch.setattr(headers, "_version", lambda folder: torch.version.cuda)
        thunder_executors(nvfuser=True)
        from thunder.executors import nvfuserex_impl

        monkeypatch.setattr(nvfuserex_impl.FusionDefinitionWrapper, "__call__", not_launched)
        monkeypatch.setattr(Program, "__call__", not_launched)

    return pretend


class NotLaunchedError(Exception):
    """Where a device would be needed."""


def not_launched(self, *args, **kwargs):
    raise NotLaunchedError


@dataclass
class Traced:
    """The traces of a call, as thunder would run them."""

    forward: Any
    backward: Any = None

    def fusions(self, backward: bool = False) -> list[list[str]]:
        """The symbols in each of nvFuser's regions."""
        trace = self.backward if backward else self.forward
        return [
            [s.sym.name for s in b.subsymbols]
            for b in trace.bound_symbols
            if b.sym.name.startswith("nvFusion")
        ]

    def others(self) -> list[str]:
        """What stands outside of them."""
        skipped = ("nvFusion", "python_", "unpack_")
        return [
            b.sym.name for b in self.forward.bound_symbols if not b.sym.name.startswith(skipped)
        ]

    def run(self, *args: torch.Tensor) -> Any:
        """What the forward computes of CPU tensors: definitions by the interpreter of their
        text.
        """
        from fusion_moe.integrations.thunder.graph import callable_of

        values = {p.name: t for p, t in zip(self.forward.args, args, strict=True)}
        for b in self.forward.bound_symbols:
            given = [values[a.name] if hasattr(a, "name") else a for a in b.args]
            if b.sym.name.startswith("nvFusion"):
                results = interpret(str(definition(b)), given)
                values.update((p.name, t) for p, t in zip(b.output, results, strict=True))
            elif b.sym.name == "fusion_moe_codes":
                values[b.output.name] = callable_of(b)(*given)
            elif b.sym.name == "python_return":
                return tuple(values[p.name] for p in b.args[0])
            else:
                assert b.sym.name.startswith(("unpack_", "python_del"))
        raise AssertionError("a trace returns")


def definition(bsym) -> Any:
    """nvFuser's definition of a region, for contiguous inputs and codes as they come."""
    from nvfuser_direct import compute_tensor_descriptor

    (call,) = bsym._call_ctx.values()
    metas = [torch.empty(tuple(p.shape), device="meta") for p in bsym.args]
    metas = [
        t.mT.contiguous().mT if "e2m1" in str(p.dtype) else t
        for p, t in zip(bsym.args, metas, strict=True)
    ]
    return call.get_fd(
        tuple((*map(tuple, compute_tensor_descriptor(t.shape, t.stride())), ()) for t in metas)
    )


def traced(f, *args: torch.Tensor) -> Traced:
    """f on CUDA tensors like these."""
    import thunder

    run = thunder.jit(f, executors=thunder_executors(nvfuser=True))
    with fake_tensor.FakeTensorMode():
        fakes = [
            torch.empty_strided(
                t.shape, t.stride(), dtype=t.dtype, device="cuda", requires_grad=t.requires_grad
            )
            for t in args
        ]
        with contextlib.suppress(NotLaunchedError):
            run(*fakes)
    backward = thunder.last_backward_traces(run)
    return Traced(thunder.last_traces(run)[-1], backward[-1] if backward else None)


def weight(n: int, k: int, seed: int = 0):
    return O.nvfp4_quantize(
        torch.randn(G, n, k, generator=torch.Generator().manual_seed(seed)) * 0.2
    )


def inputs(dtype=torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """x [T, H], ids [T, K], w [T, K], the weights up [2I, H] and down [H, I]."""
    g = torch.Generator().manual_seed(1)
    x, ids, w = (
        torch.randn(T, H, generator=g).to(dtype),
        torch.randint(0, G, (T, K), generator=g),
        torch.rand(T, K, generator=g),
    )
    return (x, ids, w, *weight(2 * I, H), *weight(H, I))


def small(x, ids, w, *parts, activation_format="bf16"):
    """Experts in small operations, and a residual sum."""
    ends, row_of, slot_of = O.route(ids, G)
    gate, up = O.nvfp4_grouped_mm(
        x[row_of], *parts[:3], ends, activation_format=activation_format
    ).chunk(2, -1)
    y = O.nvfp4_grouped_mm(F.silu(gate) * up, *parts[3:], ends, activation_format=activation_format)
    return x + O.combine(y, slot_of, w)


def one(x, ids, w, *parts):
    return x + O.expert_mlp(x, ids, w, *parts)


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    """Within a few roundings to bf16 of the largest element: products round their decoded weights,
    nvFuser keeps float32 between.
    """
    assert found.dtype == want.dtype
    bound = 8 * 2.0**-8 * want.double().abs().max().item()
    torch.testing.assert_close(found.double(), want.double(), rtol=2.0**-6, atol=bound)


@pytest.mark.parametrize("f", [one, small])
def test_everything_is_one_region(f, device):
    args = inputs()
    want = f(*args)
    device(9, 0)
    result = traced(f, *args)
    (inside,) = result.fusions()
    assert result.others() == ["fusion_moe_codes", "fusion_moe_codes"]
    assert [name for name in inside if name.startswith("nv_")] == (
        ["nv_fusion_moe_expert_mlp"]
        if f is one
        else [
            "nv_fusion_moe_route",
            "nv_fusion_moe_nvfp4_grouped_mm",
            "nv_fusion_moe_nvfp4_grouped_mm",
            "nv_fusion_moe_combine",
        ]
    )
    assert "add" in inside
    (got,) = result.run(*args)
    close(got, want)


def test_the_trace(device, golden):
    device(9, 0)
    from thunder.core.trace import tracectx

    result = traced(small, *inputs())
    with tracectx(result.forward):
        shown = [
            b
            for b in result.forward.bound_symbols
            if b.sym.name.startswith(("nvFusion", "fusion_moe"))
        ]
        golden(
            "\n".join(
                line
                for b in shown
                for line in b.from_bsym(header="").python(indent=0, print_depth=2)
            )
        )


def test_codes_that_are_used_twice_are_viewed_once(device):
    def f(x, ends, *up):
        return O.nvfp4_grouped_mm(x, *up, ends) + O.nvfp4_grouped_mm(x + 1, *up, ends)

    x, ends, up = inputs()[0], torch.tensor([1, 1, 4, 5], dtype=torch.int32), weight(I, H)
    want = f(x, ends, *up)
    device(9, 0)
    result = traced(f, x, ends, *up)
    assert result.others() == ["fusion_moe_codes"]
    close(result.run(x, ends, *up)[0], want)


def test_4_bit_activations_need_capability_10(device):
    def f(*args):
        return small(*args, activation_format="nvfp4")

    device(10, 0)
    result = traced(f, *inputs())
    (fusion,) = [b for b in result.forward.bound_symbols if b.sym.name.startswith("nvFusion")]
    assert str(definition(fusion)).count("fd.ops.cutlass_nvfp4_grouped_mm") == 2
    # the products stay operations, of which our executor says that the device cannot do what was
    # asked for
    device(9, 0)
    with pytest.raises(
        errors.UnsupportedError, match="nvfp4 activations require compute capability 10.0"
    ):
        traced(f, *inputs())


@pytest.mark.parametrize(
    ("activation_format", "capability"), [("bf16", (9, 0)), ("nvfp4", (10, 0))]
)
def test_weights_as_thunders_benchmarks_have_them(activation_format, capability, device):
    """[G, K/2, N], K running fastest, in fp4; 4-bit activations take them as they are"""
    codes, scale, decode_scale = weight(I, H)
    sizes = torch.tensor([[m, I, H] for m in (1, 0, 3, 1)], dtype=torch.int32)
    starts, padded_starts = (
        torch.tensor(s, dtype=torch.int32) for s in ([0, 1, 1, 4], [0, 128, 128, 256])
    )
    fp4 = codes.view(torch.float4_e2m1fn_x2).mT
    args = (inputs()[0], fp4, swizzled(scale), decode_scale, starts, padded_starts, sizes)

    def f(x, *rest):
        return (
            O.f16a_nvfp4weight_scaled_grouped_mm(x, *rest, activation_format=activation_format) + x
        )

    with fusion_moe.options.override(target="reference"):
        want = f(*args)
    device(*capability)
    result = traced(f, *args)
    (fusion,) = [b for b in result.forward.bound_symbols if b.sym.name.startswith("nvFusion")]
    assert str(definition(fusion)).count("fd.ops.cutlass_nvfp4_grouped_mm") == (
        activation_format == "nvfp4"
    )
    close(result.run(*args)[0], want)


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Block scales [G, N, K/16] swizzled as the benchmarks store them."""
    from fusion_moe.layouts import LAYOUTS

    return torch.stack(
        [
            LAYOUTS["sf128x4"].forward(s, torch.tensor([s.shape[0]], dtype=torch.int32))
            for s in scale
        ]
    )


@pytest.fixture
def define():
    with library("thunder_nv") as define:
        yield define


def between(operation):
    """A function of two products with an operation between, and its arguments."""

    def f(x, ends, *parts):
        y = operation(O.nvfp4_grouped_mm(x, *parts[:3], ends) * 2)
        return O.nvfp4_grouped_mm(y + 1, *parts[3:], ends)

    ends = torch.tensor([1, 1, 4, 5], dtype=torch.int32)
    return f, (inputs()[0], ends, *weight(I, H), *weight(H, I))


def test_a_users_operation(device, define):
    f, args = between(define("squared_relu", "(Tensor x) -> Tensor", lambda x: x.relu() ** 2))

    @translator("thunder_nv::squared_relu")
    def _(fd, x):
        y = fd.ops.relu(x)
        return fd.ops.mul(y, y)

    want = f(*args)
    device(9, 0)
    result = traced(f, *args)
    (inside,) = result.fusions()
    assert "nv_thunder_nv_squared_relu" in inside
    close(result.run(*args)[0], want)


def test_a_users_translator_at_fault(device, define, caplog):
    """its call stays between two regions, and a warning says where the translator is"""
    f, args = between(define("at_fault", "(Tensor x) -> Tensor", lambda x: x * 2))
    translator("thunder_nv::at_fault")(lambda fd, x: fd.ops.cast(x, dtype="f32"))
    device(9, 0)
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        result = traced(f, *args)
    assert len(result.fusions()) == 2
    assert "thunder_nv_at_fault" in result.others()
    said = (
        r"thunder_nv.at_fault.default is not fused by nvFuser: test_thunder_nvfuser.py:\d+: "
        r"the translator of .*at_fault returned f32\[5, 128\]; expected bf16\[5, 128\], as its fake"
    )
    assert any(re.search(said, r.getMessage()) for r in caplog.records)


@pytest.mark.gpu  # autograd's engine needs a device where tensors have one, be they fakes
def test_the_backward_too(device):
    x, *rest = inputs()
    device(9, 0)
    result = traced(one, x.requires_grad_(), *rest)
    assert any("nv_fusion_moe_run" in fusion for fusion in result.fusions())
    # its products are kept in float32, which nvFuser's cannot: they are ours, and nvFuser adds the
    # gradients
    assert "nv_fusion_moe_run" not in [
        name for fusion in result.fusions(backward=True) for name in fusion
    ]
    assert any("add" in fusion for fusion in result.fusions(backward=True))
    assert any(b.sym.name.startswith("fusion_moe0") for b in result.backward.bound_symbols)


def no_rows() -> tuple[torch.Tensor, ...]:
    x, ids, w, *parts = inputs()
    return x[:0], ids[:0], w[:0], *parts


@pytest.mark.parametrize(
    ("f", "args", "refused", "products"),
    [
        (one, inputs(torch.float32), "expert_mlp", 0),  # its product takes no float32
        (one, no_rows(), "expert_mlp", 0),
        # without headers for sorts nvFuser would assert, and has no way back
        (small, inputs(), "route", 2),
    ],
    ids=["float32", "no rows", "no headers"],
)
def test_what_nvfuser_refuses_is_ours(f, args, refused, products, device, monkeypatch):
    device(9, 0)
    if refused == "route":
        monkeypatch.setattr(headers, "_version", lambda folder: "")
    result = traced(f, *args)
    inside = [name for fusion in result.fusions() for name in fusion]
    assert f"nv_fusion_moe_{refused}" not in inside
    assert inside.count("nv_fusion_moe_nvfp4_grouped_mm") == products
    assert any(name.startswith("fusion_moe") for name in result.others())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", ["words", "e2m1"])
def test_codes_and_back(form, transposed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    from fusion_moe.integrations.nvfuser.values import form_of
    from fusion_moe.integrations.thunder.nvfuser import codes_of

    codes = torch.randint(0, 256, (G, 6, 16), dtype=torch.uint8)
    given = codes.mT if transposed else codes
    formed = form_of(given, form, transposed)
    assert formed.data_ptr() == codes.data_ptr()
    assert codes_of(formed, form, transposed).equal(given)
    assert (
        form_of(torch.cat([codes[:1], codes])[1:], form, transposed=False).view(torch.uint8).numel()
        == codes.numel()
    )


def test_where_thunder_has_no_nvfuser(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from fusion_moe.thunder import executor as thunder_executor

    monkeypatch.setattr(thunder_executor.executor, "for_nvfuser", None)
    with pytest.raises(
        errors.UnsupportedError, match="thunder does not use nvFuser here; expected a CUDA device"
    ):
        thunder_executors(nvfuser=True)
