"""quantization_config=NVFP4Config(), and what is saved of a model that was quantized here."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from decoded import configured, logits, relative, same_parameters
from make_checkpoints import model_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

import fusion_moe
from fusion_moe.checkpoints import convert, quantize as quantize_files
from fusion_moe.encodings import FP8, FP8_CHANNEL, FP8_TENSOR, NVFP4, dequantize, quantize
from fusion_moe.errors import CheckpointError, OptionError, UnsupportedError
from fusion_moe.nn import Experts, Llama4MoE
from fusion_moe.nn.frozen.projections import Projections
from fusion_moe.transformers import NVFP4Config, from_pretrained

MADE = Path(__file__).parents[2] / "checkpoints" / "made"

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "llama4_text")
LINEAR = ("proj.weight", "w1.weight", "w2.weight", "w3.weight")


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    model_of(request.param).save_pretrained(directory)
    return directory


def test_quantized_while_loading_is_quantized_afterwards(saved, tmp_path):
    model, info = AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=NVFP4Config(), output_loading_info=True
    )
    assert not any(info.values())
    other = AutoModelForCausalLM.from_pretrained(saved)
    fusion_moe.quantize_(other)
    assert same_parameters(model, other)
    for number, made in enumerate((model, other)):  # and both are saved as what loads again
        made.save_pretrained(tmp_path / str(number))
        again, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / str(number), output_loading_info=True
        )
        assert not any(info.values())
        assert same_parameters(again, other)
        # bfloat16, by products that depend on alignment
        assert relative(logits(again), logits(other)) <= 1e-2


def test_the_configuration_of_quantize_will_do(saved):
    for load in (AutoModelForCausalLM.from_pretrained, from_pretrained):
        model = load(saved, quantization_config=fusion_moe.NVFP4Config("nvfp4"))
        assert formats(model) == {"nvfp4"}
        assert model.config.to_dict()["quantization_config"] == NVFP4Config("nvfp4").to_dict()


def test_a_format_by_its_name(saved, tmp_path):
    model = from_pretrained(saved, quantization_config="nvfp4")
    other = from_pretrained(saved, quantization_config=fusion_moe.NVFP4Config())
    assert same_parameters(model, other)
    model.save_pretrained(tmp_path)
    assert same_parameters(from_pretrained(tmp_path, quantization_config="nvfp4"), other)
    with pytest.raises(OptionError, match="config = 'nvfp3'.*did you mean"):
        from_pretrained(saved, quantization_config="nvfp3")


def test_names_in_files_are_the_familys(tmp_path):
    model = model_of("mixtral", torch.float32)
    fusion_moe.quantize_(model)
    model.save_pretrained(tmp_path)
    names = [name for name in load_file(tmp_path / "model.safetensors") if "experts.3." in name]
    parts = ("weight", "weight_scale", "weight_scale_2")
    assert sorted(names) == [
        f"model.layers.0.block_sparse_moe.experts.3.{w}.{p}"
        for w in ("w1", "w2", "w3")
        for p in parts
    ]
    written = AutoConfig.from_pretrained(tmp_path).quantization_config
    assert (written["quant_method"], written["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj"} <= set(
        written["ignore"]
    )
    assert "model.layers.0.block_sparse_moe.gate" in written["ignore"]


def formats(model) -> set[str]:
    return {m.activation_format for m in model.modules() if isinstance(m, Projections)}


def written(directory) -> dict[str, object]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def test_the_format_of_activations_is_saved_and_loaded(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved)
    fusion_moe.quantize_(model, NVFP4Config("nvfp4"))
    model.save_pretrained(tmp_path / "first")
    for load in (AutoModelForCausalLM.from_pretrained, from_pretrained):
        again = load(tmp_path / "first")
        assert formats(again) == {"nvfp4"}
        assert same_parameters(again, model)
    again.save_pretrained(tmp_path / "again")
    assert written(tmp_path / "again") == written(tmp_path / "first")


def test_a_format_that_is_asked_for_goes_first(tmp_path):
    directory = MADE / "modelopt-qwen3_moe"
    for number, (asked, said) in enumerate((("nvfp4", "nvfp4"), ("bf16", None))):
        model = from_pretrained(directory, quantization_config=NVFP4Config(asked))
        assert formats(model) == {asked}
        directory = tmp_path / str(number)
        model.save_pretrained(directory)
        assert written(directory).get("activation_format") == said
        assert formats(from_pretrained(convert(directory, tmp_path / f"{number} converted"))) == {
            asked
        }


def test_formats_that_differ_are_not_written(tmp_path):
    model = from_pretrained(MADE / "modelopt-qwen3_5_moe-mixed")
    next(m for m in model.modules() if isinstance(m, Projections)).activation_format = "nvfp4"
    with pytest.raises(
        UnsupportedError,
        match="experts with activation_format bf16 and nvfp4 to save; expected one for all of them",
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_format_that_is_none(tmp_path):
    copy = shutil.copytree(MADE / "modelopt-qwen3_moe", tmp_path / "copy")
    configured(copy, lambda c: c["quantization_config"].update(activation_format="fp4"))
    with pytest.raises(OptionError, match="activation_format = 'fp4'; expected one of bf16, nvfp4"):
        AutoModelForCausalLM.from_pretrained(copy)


def test_what_nothing_would_load_is_not_written(tmp_path):
    model = model_of("qwen3_moe", torch.float32)
    fusion_moe.quantize_(model)
    up, down = (quantize(torch.randn(shape), FP8_CHANNEL) for shape in ((4, 64, 64), (4, 64, 32)))
    model.model.layers[0].mlp.experts = Experts(up, down)
    with pytest.raises(
        UnsupportedError, match="weights in fp8_channel; expected one of nvfp4, mxf"
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_llama_4_is_replaced_as_a_whole(tmp_path):
    model_of("llama4_text", torch.float32).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=NVFP4Config())
    assert isinstance(model.model.layers[0].feed_forward, Llama4MoE)


def eight_bit(directory, left="-"):
    """The linear layers of a directory in blocks of 128 x 128, as DeepSeek-V3 has them, except
    those with this in their names -> what they mean, bfloat16.
    """
    file = directory / "model.safetensors"
    found, meant = load_file(file), {}
    for name in [
        name
        for name, t in found.items()
        if t.dim() == 2 and name.endswith(LINEAR) and left not in name
    ]:
        scale = found[name].float().abs().max() / 448
        values = (found[name].float() / scale).to(torch.float8_e4m3fn)
        found |= {name: values, f"{name}_scale_inv": scale.reshape(1, 1)}
        meant[name] = (values.float() * scale).bfloat16()
    save_file(found, file, metadata={"format": "pt"})
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    said |= {"weight_block_size": [128, 128]}
    configured(directory, lambda c: c.update(quantization_config=said))
    return meant


@pytest.mark.parametrize(
    ("family", "left"),
    [("qwen3_moe", "-"), ("mixtral", "-"), ("qwen3_moe", "layers.0.mlp.experts")],
)
def test_eight_bit_floats_are_quantized_if_asked(family, left, tmp_path):
    """And experts that some layers have in bfloat16."""
    model = model_of(family, num_hidden_layers=2)
    for directory in ("plain", "eight"):
        model.save_pretrained(tmp_path / directory)
    meant = eight_bit(tmp_path / "eight", left)
    save_file(
        load_file(tmp_path / "plain" / "model.safetensors") | meant,
        tmp_path / "plain" / "model.safetensors",
        {"format": "pt"},
    )
    as_it_is = from_pretrained(tmp_path / "eight").model.layers[1].mlp.experts
    assert as_it_is.encoding == FP8_TENSOR
    made = from_pretrained(tmp_path / "eight", quantization_config=NVFP4Config())
    want = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    fusion_moe.quantize_(want)
    assert same_parameters(made, want)
    made.save_pretrained(tmp_path / "saved")
    assert same_parameters(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), made)


def test_eight_bit_floats_with_rows_in_fp8_if_asked(tmp_path):
    """By our configuration or transformers'; never by what the directory says."""
    model_of("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    eight_bit(tmp_path)

    def experts(**how):
        return from_pretrained(tmp_path, **how).model.layers[0].mlp.experts

    asked = NVFP4Config("fp8", weights="fp8"), FineGrainedFP8Config()
    for config, form in (None, "bf16"), *((config, "fp8") for config in asked):
        made = experts(**({} if config is None else {"quantization_config": config}))
        assert (made.encoding, made.activation_format) == (FP8_TENSOR, form)
    for wrong in (
        {"weight_block_size": (64, 64)},
        {"activation_scheme": "static"},
        {"dequantize": True},
    ):
        with pytest.raises(UnsupportedError, match="FineGrainedFP8Config: .* expected"):
            experts(quantization_config=FineGrainedFP8Config(**wrong))


def test_experts_are_requantized_as_they_are_loaded_and_saved_as_they_were(tmp_path):
    source = MADE / "modelopt-qwen3_5_moe-mixed"
    as_it_is = from_pretrained(source)
    made = from_pretrained(source, quantization_config=NVFP4Config("fp8", weights="fp8"))
    requantized = [m for m in made.modules() if getattr(m, "reading", None)]
    assert requantized
    assert {m.weights for m in requantized} == {"fp8"}
    made.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert same_parameters(again, as_it_is)
    kept = {m.activation_format for m in again.modules() if hasattr(m, "reading")}
    assert kept == {"fp8"}


@pytest.mark.parametrize("weights", ["fp8", "both"])
def test_experts_in_floats_are_requantized_as_they_are_loaded(weights, tmp_path):
    model_of("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    config, want = NVFP4Config(weights=weights), AutoModelForCausalLM.from_pretrained(tmp_path)
    made = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    fusion_moe.quantize_(want, config)
    assert same_parameters(made, want)
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(made(tokens).logits, want(tokens).logits)
    assert {m.weights for m in made.modules() if getattr(m, "reading", None)} == {weights}


@pytest.mark.parametrize("factor", [float("nan"), -1.0])
def test_scales_of_eight_bit_floats_are_numbers(factor, tmp_path):
    model_of("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    eight_bit(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    found["model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"].mul_(factor)
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="safetensors: .*experts.1.up_proj.weight_scale_inv"):
        from_pretrained(tmp_path, quantization_config=NVFP4Config())


@pytest.mark.parametrize(
    ("algorithm", "scales", "encoding"),
    [
        ("FP8", (), FP8_TENSOR),
        ("FP8_PER_CHANNEL_PER_TOKEN", ("n", 1), FP8_CHANNEL),
        ("FP8_PB_WO", (2, 2), FP8),
    ],
)
def test_eight_bit_floats_of_modelopt(algorithm, scales, encoding, tmp_path):
    """With each kind of scale that its algorithms have."""
    sizes = {"hidden_size": 144, "moe_intermediate_size": 160}
    model_of("qwen3_moe", torch.float32, **sizes).save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    for name in [name for name in found if ".experts." in name]:
        shape = [found[name].shape[0] if size == "n" else size for size in scales]
        found |= {name: found[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(shape)}
    want = {name: t.float() for name, t in found.items() if not name.endswith("_scale")}
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = {"quant_method": "modelopt", "quant_algo": algorithm}
    configured(tmp_path, lambda c: c.update(quantization_config=said))
    made = from_pretrained(tmp_path, dtype=torch.float32).model.layers[0].mlp.experts
    assert made.encoding == encoding
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(len(made.down_proj))]
    down = torch.stack([want[name] for name in names])
    assert torch.equal(dequantize(made.weight_of("down")), down)


def test_an_expert_with_scales_of_another_kind(tmp_path):
    model_of("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    eight_bit(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    found[f"{name}_scale_inv"] = torch.full((len(found[name]), 1), 0.1)
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    experts = from_pretrained(tmp_path, dtype=torch.float32).model.layers[0].mlp.experts
    rows = experts.gate_up_proj[1, len(found[name]) :]
    assert torch.equal(rows, found[name].float() * 0.1)


def test_experts_in_several_formats(tmp_path):
    """NVFP4 in one layer and 8-bit floats in the other, under the same names: both become NVFP4, as
    `quantize` does it on disk.
    """
    mixed = shutil.copytree(MADE / "modelopt-qwen3_5_moe-mixed", tmp_path / "mixed")
    found = load_file(mixed / "model.safetensors")
    for name in [
        name
        for name, t in found.items()
        if "layers.1.mlp.experts" in name and t.dtype == torch.uint8
    ]:
        n, packed = found[name].shape
        del found[f"{name}_scale_2"]
        found |= {
            name: torch.randn(n, 2 * packed).to(torch.float8_e4m3fn),
            f"{name}_scale": torch.tensor(0.1),
        }
    save_file(found, mixed / "model.safetensors", metadata={"format": "pt"})
    layers = from_pretrained(mixed).model.layers
    assert [layer.mlp.experts.encoding for layer in layers] == [NVFP4, FP8_TENSOR]
    made = from_pretrained(mixed, quantization_config=NVFP4Config())
    on_disk = from_pretrained(quantize_files(mixed, tmp_path / "quantized"))
    assert same_parameters(made.model.layers[1].mlp, on_disk.model.layers[1].mlp)


@pytest.mark.parametrize("rule", ["mse", "four_over_six"])
def test_the_rule_for_scales_is_saved_and_loaded(saved, rule, tmp_path):
    config = NVFP4Config(scales=rule)
    loaded, model = from_pretrained(saved, quantization_config=config), from_pretrained(saved)
    fusion_moe.quantize_(model, config)
    both = loaded.state_dict(), model.state_dict()
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(t.float(), both[1][key].float()) for key, t in both[0].items())
    for made, name in (loaded, "one"), (model, "two"):
        made.save_pretrained(tmp_path / name)
        assert written(tmp_path / name)["scales"] == rule
    again = from_pretrained(tmp_path / "one", quantization_config=NVFP4Config("nvfp4"))
    again.save_pretrained(tmp_path / "again")  # whose bytes are those of the file
    found = written(tmp_path / "again")
    assert (found["scales"], found["activation_format"]) == (rule, "nvfp4")


def test_eight_bit_floats_by_a_rule(tmp_path):
    model_of("qwen3_moe", torch.float32).save_pretrained(eight := tmp_path / "eight")
    eight_bit(eight)
    made = from_pretrained(eight, quantization_config=NVFP4Config(scales="max"))
    one = from_pretrained(eight, quantization_config=NVFP4Config())
    pairs = zip(made.modules(), one.modules(), strict=True)
    pairs = [(a, b) for a, b in pairs if isinstance(a, Projections)]
    assert pairs
    assert all((a.scales, b.scales) == ("max", "mse") for a, b in pairs)
    assert all((a.down_proj_scale.float() != b.down_proj_scale.float()).any() for a, b in pairs)


METHODS = {"mxfp4": "compressed-tensors", "int4": "compressed-tensors", "fp8": "fp8"}


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "gpt_oss"])
def whole_blocks(request, tmp_path_factory):
    """Sizes that are whole blocks of all formats; FP8 has more than one in a matrix."""
    sizes = {"hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128}
    directory = tmp_path_factory.mktemp(request.param)
    model_of(request.param, **sizes).save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("linear", [False, True])
def test_formats_are_saved_and_loaded(whole_blocks, name, linear, tmp_path):
    """Quantized while it is loaded or afterwards: bit for bit, once and twice, with its rule. The
    number of parameters stays.
    """
    model = from_pretrained(whole_blocks)
    count = model.num_parameters()
    fusion_moe.quantize_(model, name, linear=linear)
    assert (model.num_parameters(), model.num_parameters(True) < count) == (count, True)
    config = fusion_moe.nn.config.CONFIGS[name](linear=linear)
    loaded = from_pretrained(whole_blocks, quantization_config=config)
    assert same_parameters(loaded, model)
    assert loaded.num_parameters() == count
    model.save_pretrained(tmp_path / "one")
    again = from_pretrained(tmp_path / "one")
    assert same_parameters(again, model)
    found = written(tmp_path / "one")
    gpt_oss = name == "mxfp4" and whole_blocks.name.startswith("gpt_oss") and not linear
    assert found["quant_method"] == ("mxfp4" if gpt_oss else METHODS[name])
    assert found.get("scales") == ("mse" if name == "int4" else None)
    again.save_pretrained(tmp_path / "two")
    assert written(tmp_path / "two") == found
    assert same_parameters(from_pretrained(tmp_path / "two"), model)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two_layers")
    model_of("qwen3_moe", torch.float32, num_hidden_layers=2).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("linear", [False, True])
def test_what_is_skipped_stays_in_floats(two_layers, linear):
    """By the words of quantize_, in the configuration or beside it."""
    skip = ["*.layers.0.*", "*.v_proj"]
    model, other, third = (AutoModelForCausalLM.from_pretrained(two_layers) for _ in range(3))
    fusion_moe.quantize_(model, skip=skip, linear=linear)
    fusion_moe.quantize_(other, fusion_moe.NVFP4Config(skip=skip[:1], linear=linear), skip=skip[1:])
    config = NVFP4Config(skip=skip, linear=linear)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        two_layers, quantization_config=config, output_loading_info=True
    )
    assert not any(info.values())
    assert same_parameters(other, model)
    assert same_parameters(loaded, model)
    kinds = {n: type(m) for n, m in loaded.named_modules()}
    assert kinds["model.layers.0.mlp.experts"] is type(third.model.layers[0].mlp.experts)
    assert kinds["model.layers.1.self_attn.v_proj"] is torch.nn.Linear
    quantized = kinds["model.layers.1.self_attn.q_proj"] is fusion_moe.nn.QuantizedLinear
    assert quantized == linear


def test_errors_say_what_to_skip(two_layers, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # whatever a test before has set
    model = AutoModelForCausalLM.from_pretrained(two_layers)
    name = "model.layers.1.mlp.experts"
    model.get_submodule(name).down_proj.data[1, 2, 3] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(RuntimeError):  # transformers', which logs ours
        AutoModelForCausalLM.from_pretrained(tmp_path / "nan", quantization_config=NVFP4Config())
    assert f"skip=['{name}'] leaves it as it is" in caplog.text
    config = NVFP4Config(skip=[name])
    AutoModelForCausalLM.from_pretrained(tmp_path / "nan", quantization_config=config)
    unknown = NVFP4Config(skip=["*.none"])
    with pytest.raises(OptionError, match=r"skip: '\*\.none' fits no module.*a list"):
        AutoModelForCausalLM.from_pretrained(two_layers, quantization_config=unknown)
    with pytest.raises(OptionError, match="skip = 'x'.*a list of names"):
        NVFP4Config(skip="x")
    from_pretrained(two_layers, quantization_config=NVFP4Config()).save_pretrained(tmp_path / "q")
    with pytest.raises(UnsupportedError, match="skip or linear for weights"):
        from_pretrained(tmp_path / "q", quantization_config=config)


def down_of(model) -> torch.Tensor:
    """What the second projection's bytes mean, f32 [E, H, I]."""
    return dequantize(model.model.layers[0].mlp.experts.weight_of("down"))


def test_what_transformers_itself_reads(whole_blocks, tmp_path):
    """MXFP4 of gpt-oss, FP8 of other families: on CPUs it makes bfloat16 of them."""
    gpt_oss = whole_blocks.name.startswith("gpt_oss")
    model = from_pretrained(whole_blocks)
    fusion_moe.quantize_(model, "mxfp4" if gpt_oss else "fp8")
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = theirs.model.layers[0].mlp.experts.down_proj
    assert torch.equal(found.mT if gpt_oss else found, down_of(model).bfloat16())


@pytest.mark.parametrize("name", ["mxfp4", "int4"])
def test_what_compressed_tensors_reads(whole_blocks, name, tmp_path):
    """Its own class for the configuration, and its decoder."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    of_theirs = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig
    model = from_pretrained(whole_blocks)
    fusion_moe.quantize_(model, name, linear=True)
    model.save_pretrained(tmp_path)
    found, files = written(tmp_path), load_file(tmp_path / "model.safetensors")
    scheme = of_theirs.model_validate(found).config_groups["group_0"]
    decoder = compressors.BaseCompressor.get_value_from_registry(found["format"])
    suffix = "w2." if whole_blocks.name.startswith("mixtral") else "down_proj."
    for e, want in enumerate(down_of(model)):
        parts = {
            key.rpartition(".")[2]: t
            for key, t in files.items()
            if f"experts.{e}.{suffix}weight" in key
        }
        got = decoder.decompress(parts, scheme)["weight"]
        assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("modelopt-qwen3_moe", "int4"),
        ("ct-qwen3_moe-int4", "mxfp4"),
        ("modelopt-qwen3_moe", "fp8"),
    ],
)
def test_experts_in_another_format_than_is_asked_for(name, asked):
    """Few bits are not rounded to others: they would silently stay as they are."""
    with pytest.raises(UnsupportedError, match=f"experts in .*; expected {asked}, or floats to be"):
        from_pretrained(MADE / name, quantization_config=asked)
    from_pretrained(MADE / "ct-qwen3_moe-int4", quantization_config="int4")
