"""nn.Experts: any encoding, biases, clamp and interleave; and gpt-oss' experts in MXFP4 as
transformers computes them.
"""

import runpy
from pathlib import Path

import pytest
import torch
from bad_calls import messages
from experts import copied, routed, same_state
from fusions import fusion_of_call

import fusion_moe
from fusion_moe import NVFP4Experts, options
from fusion_moe.backends import TARGETS
from fusion_moe.encodings import ENCODINGS, MXFP4, NVFP4, dequantize, quantize
from fusion_moe.integrations.nvfuser.scheduler import can_schedule
from fusion_moe.nn import Experts, swiglu

E, H, I = 3, 128, 128
FP8 = ["fp8", "fp8_e8m0", "fp8_channel", "fp8_tensor"]


def weights(encoding: str):
    g = torch.Generator().manual_seed(0)
    shapes = ((E, 2 * I, H), (E, H, I))
    return [
        quantize(torch.randn(*shape, generator=g) / 8, encoding=ENCODINGS[encoding])
        for shape in shapes
    ]


def call(module, dtype=torch.float32):
    x, ids, w = routed(E, H)
    return module(x.to(dtype), ids, w)


@pytest.mark.parametrize("encoding", ["mxfp4", "int4", "bf16", "nvfp4", *FP8])
def test_biases_clamp_and_interleave(encoding):
    """Interleaved rows of gate and up with everything that gpt-oss has, against the same rows
    apart, by hand.
    """
    gate_up, down = weights(encoding)
    biases = [torch.randn(E, n, generator=torch.Generator().manual_seed(n)) for n in (2 * I, H)]
    module = Experts(
        gate_up,
        down,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        activation=swiglu(interleave=1, limit=0.5, alpha=1.702, up_offset=1.0),
    )
    w = {name: dequantize(q) for name, q in (("gate_up", gate_up), ("down", down))}

    def by_hand(x, ids, p):
        y = torch.einsum("enh,th->ten", w["gate_up"], x) + biases[0]
        gate, up = y[..., ::2].clamp(max=0.5), y[..., 1::2].clamp(-0.5, 0.5)
        out = (
            torch.einsum("ehi,tei->teh", w["down"], gate * torch.sigmoid(1.702 * gate) * (up + 1))
            + biases[1]
        )
        return (out.gather(1, ids[..., None].expand(-1, -1, H)) * p[..., None]).sum(1)

    # all encodings have the same epilogues: kernels of one
    with options.override(target="auto" if encoding == "nvfp4" else "reference"):
        torch.testing.assert_close(call(module), call(by_hand), rtol=1e-4, atol=1e-4)
        assert call(module.bfloat16(), torch.bfloat16).dtype == torch.bfloat16
    assert "activation='t5 = minimum(gate, 0.5); t6 = minimum(up, 0.5)" in repr(module)
    assert module.gate_up_proj_bias.dtype == torch.bfloat16
    assert module.gate_up_proj.dtype == ENCODINGS[encoding].element.dtype


def test_mxfp4_experts_become_nvfp4():
    """The same numbers, in what nvFuser reads; with biases and prepared weights too."""
    gate_up, down = weights("mxfp4")
    gate_up.block_scale.view(torch.uint8)[0, 0] += 20  # more octaves than one decode scale can take
    module = Experts(gate_up, down, gate_up_bias=torch.ones(E, 2 * I), activation=swiglu(limit=2.0))
    want, numbers = call(module), [dequantize(q) for q in (gate_up, down)]
    fusion_moe.prepare_(module, "cuda")
    assert module.to_nvfp4() is module
    assert (module.encoding, module.weight_layout) == (NVFP4, "linear")
    assert {
        name: tuple(t.shape) for name, t in module.state_dict().items() if "decode" in name
    } == {
        "gate_up_decode_scale": (E, 2 * I),
        "down_decode_scale": (E,),
    }
    assert all(
        torch.equal(dequantize(module.weight_of(name)), w)
        for name, w in zip(("gate_up", "down"), numbers, strict=True)
    )
    torch.testing.assert_close(call(module), want, rtol=1e-5, atol=1e-5)
    assert module.to_nvfp4().weight_of("down").codes.data_ptr() == module.down_proj.data_ptr()
    x, offs = torch.zeros(4, H).bfloat16(), torch.tensor([1, 2, 4], dtype=torch.int32)
    for weight, why in (
        (weights("mxfp4")[0], "pack of mxfp4: nvfp4 is lowered"),
        (module.weight_of("gate_up"), None),
    ):
        how = {"weight_format": weight.encoding.name}
        fusion = fusion_of_call("grouped_mm", x, list(weight), offs, **how)
        assert can_schedule(fusion, TARGETS["sm_90"]) == why


def both(encoding: str):
    """Experts, and others with other weights."""
    other = [
        q.of(t[..., torch.arange(t.shape[-1] - 1, -1, -1)] if t.dim() > 2 else t for t in q)
        for q in weights(encoding)
    ]
    return Experts(*weights(encoding)), Experts(*other)


def fp8(t):
    return t.dtype.itemsize == 1 and t.is_floating_point()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4", "fp8", "fp8_e8m0"])
def test_state_dicts_of_bytes(encoding, assign):
    """As files that are older than float8 types have them, and gpt-oss's: bytes of the scales, not
    numbers.
    """
    module, other = both(encoding)
    assert not torch.equal(call(module), call(other))
    other.load_state_dict(
        {name: t.view(torch.uint8) if fp8(t) else t for name, t in module.state_dict().items()},
        assign=assign,
    )
    assert [p.dtype for p in other.parameters()] == [p.dtype for p in module.parameters()]
    assert torch.equal(call(module), call(other))


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4", "int4", *FP8])
def test_state_dicts_of_other_dtypes(encoding):
    """Numbers in place of bytes, and bytes of another format, would load as other numbers; and so
    would rounded scales.
    """
    module, other = both(encoding)
    want = copied(other)
    for name, t in module.state_dict().items():
        for dtype in torch.float8_e5m2, torch.int8, torch.int32, torch.float32, torch.float64:
            if dtype != t.dtype:
                says = f"dtype mismatch for {name}: copying a param of {dtype} from checkpoint"
                with pytest.raises(RuntimeError, match=says):
                    other.load_state_dict({name: torch.ones(t.shape).to(dtype)}, strict=False)
    assert same_state(other.state_dict(), want)


def test_numbers_in_state_dicts():
    """Those of plain weights are cast, as torch does."""
    module, other = both("bf16")
    other.load_state_dict({name: t.float() for name, t in module.state_dict().items()})
    assert torch.equal(call(module), call(other))


@pytest.mark.parametrize(
    ("encoding", "name", "value"),
    [
        ("nvfp4", "gate_up_proj_scale", 0x7F),
        ("mxfp4", "down_proj_scale", 0xFF),
        ("int4", "down_proj_scale", float("nan")),
        ("nvfp4", "down_decode_scale", float("inf")),
        ("fp8", "down_proj_scale", float("inf")),
        ("fp8_e8m0", "gate_up_proj_scale", 0xFF),
        ("fp8_tensor", "down_decode_scale", float("nan")),
    ],
)
def test_scales_that_are_not_numbers(encoding, name, value):
    module, other = both(encoding)
    name = next(
        n
        for n in module.state_dict()
        if n.startswith(name.removesuffix("_scale")) and n.endswith("scale")
    )
    state = {n: t.clone() for n, t in module.state_dict().items()}
    (state[name].view(torch.uint8) if fp8(state[name]) else state[name]).view(-1)[-1] = value
    with pytest.raises(RuntimeError, match=rf"1 NaN.* among the \d+ elements of {name}"):
        other.load_state_dict(state)
    other.load_state_dict(module.state_dict())


def test_refusals(golden):
    (gate_up, down), of_nvfp4 = weights("mxfp4"), weights("nvfp4")
    cases = {
        "two encodings": lambda: Experts(gate_up, of_nvfp4[1]),
        "a bias": lambda: Experts(gate_up, down, down_bias=torch.zeros(3, 256)),
        "int4 to NVFP4": lambda: Experts(*weights("int4")).to_nvfp4(),
    }
    golden(messages(cases))
    encodings = Experts(gate_up, down).encoding, NVFP4Experts(*of_nvfp4).encoding
    assert encodings == (MXFP4, NVFP4)


@torch.no_grad()
def test_gpt_oss_by_transformers():
    """Logits of a model with transformers' own dequantized experts, and of one with the packed
    ones.
    """
    pytest.importorskip("transformers.integrations.mxfp4")
    path = Path(__file__).parents[2] / "examples" / "mxfp4_gpt_oss.py"
    theirs, ours = (m.float() for m in runpy.run_path(str(path))["both_models"]())
    ids = torch.randint(1, 512, (1, 24), generator=torch.Generator().manual_seed(1))
    want = theirs(ids).logits
    assert (ours(ids).logits - want).norm() < 1e-5 * want.norm()


NO_TENSORS = [
    None,
    1.5,
    "text",
    [1.0],
    (torch.ones(2),),
    torch.ones(2, 4, 8).numpy(),
    torch.ones(2, 4, 8).to_sparse(),
]


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("key", ["gate_up_proj", "down_proj_scale", "down_decode_scale"])
def test_a_state_dict_of_other_things_is_torchs_error(key, value):
    module = NVFP4Experts.from_float(torch.ones(2, 64, 32), torch.ones(2, 32, 32))
    with pytest.raises(RuntimeError, match=f"{key}|Missing key"):
        module.load_state_dict(module.state_dict() | {key: value})
