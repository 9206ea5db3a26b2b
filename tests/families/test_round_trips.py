"""Every family with experts, on its own class, through every command: what is written is inspected,
loaded, converted to floats, which its class reads, and to all other forms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cover import few

pytest.importorskip("transformers")
pytest.importorskip("typer")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.checkpoints import Directory, convert, quantize
from fusion_moe.checkpoints.conversion import dense_tensors
from fusion_moe.checkpoints.families import family_of
from fusion_moe.cli.inspect_directory import inspect_directory
from fusion_moe.errors import UnsupportedError
from fusion_moe.integrations.transformers.decoding import Decoder
from fusion_moe.nn.frozen.packed import PackedModule
from fusion_moe.transformers import from_pretrained
from tests.checkpoints.files import change, change_json
from tests.families.decoded import plain_model, relative
from tests.families.models import LAYERS, E, H, I, decorated
from tests.families.tiny import FAMILIES, of_text, tiny

pytestmark = pytest.mark.once
NOT_CALLED = ("qwen3_omni_moe",)  # its thinker is
# whose own tensors beside experts get a name that its class reads too, but does not write
RENAMED = ("hy_v4", "hy_v4_vl", "inkling")
CLEAN = ("missing_keys", "unexpected_keys", "mismatched_keys")


@pytest.fixture(autouse=True)
def without_kernels():
    """Nothing is compiled for any family."""
    with options.override(target="reference"):
        yield


def logits(model: Any) -> Tensor:
    torch.manual_seed(0)  # a family has noise
    with torch.no_grad():
        return of_text(model)(input_ids=torch.arange(3, 12)[None], use_cache=False)[0]


def same(a: Any, b: Any) -> bool:
    """Whether two models have the same class, and the same bytes in the same parameters and
    buffers.
    """
    return type(a) is type(b) and same_tensors(a.state_dict(), b.state_dict())


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(t.flatten().view(torch.uint8), b[name].flatten().view(torch.uint8))
        for name, t in a.items()
    )


def read(directory: Path) -> Any:
    """A model of a directory of which inspect finds nothing wrong."""
    assert inspect_directory(directory).problems == ()
    return from_pretrained(directory, dtype=torch.float32)


def read_by(kind: Any, directory: Path) -> Any:
    """The same by its own class, which finds what it looks for and nothing else."""
    assert inspect_directory(directory).problems == ()
    model, info = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert [sorted(info[key]) for key in CLEAN] == [[], [], []]
    return model.eval()


def test_every_family():
    assert FAMILIES.keys() >= {family for family, _ in decorated()}


@pytest.mark.parametrize("family", few(FAMILIES, 10))  # test_refit.py has each
def test_nvfp4(family: str, tmp_path: Path):
    """What is saved loads again, `quantize` writes the same, and floats are what the bytes mean, by
    numpy.
    """
    original = tiny(family)
    original.save_pretrained(tmp_path / "floats")
    fusion_moe.quantize_(model := copy.deepcopy(original))
    want, plain = logits(model), plain_model(model, original)
    assert relative(logits(plain), want) <= 1e-5
    model.save_pretrained(tmp_path / "saved")
    files = tmp_path / "saved", quantize(tmp_path / "floats", tmp_path / "quantized")
    assert all(same(read(path), model) for path in files)
    assert (family in RENAMED) != same_tensors(*(load_file(f / "model.safetensors") for f in files))
    dense = convert(tmp_path / "saved", tmp_path / "dense", to="dense")
    assert same_tensors(read_by(type(model), dense).state_dict(), plain.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    names = [load_file(tmp_path / d / "model.safetensors").keys() for d in ("plain", "dense")]
    assert (family in RENAMED) != (names[0] == names[1])
    # as bench has it beside the encoded one
    config = type(model.config).from_pretrained(dense)
    numbers = dense_tensors(tmp_path / "saved", torch.float32)
    beside = from_pretrained(None, config=config, state_dict=numbers, dtype=torch.float32)
    assert same(beside.eval(), plain)
    again = read(quantize(dense, tmp_path / "again"))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert relative(logits(again), want) <= 0.5  # rounded twice; of other experts they are 1.4
    if family == "llama4":
        return  # the model around the text model fails when it is called: tiny.py
    if family in NOT_CALLED:
        with pytest.raises(UnsupportedError, match="expected a language model"):
            fusion_moe.prepare_(model, tokens=[1])
        return
    fusion_moe.prepare_(model, tokens=[1])
    decoder = Decoder(model, 16)
    assert decoder.prompt(torch.arange(3, 9)[None]).shape == decoder.step().shape == (1, 1)


# llama4 has NVFP4 alone
OTHERS = few(((family, "mxfp4") for family in FAMILIES if family != "llama4"), 4)
OTHERS += [(f, to) for f in ("gpt_oss", "mistral4", "mixtral") for to in ("int4", "fp8")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "to"), OTHERS)
def test_other_encodings(family: str, to: str, tmp_path: Path):
    """The same numbers in each form that has them."""
    original = tiny(family)
    fusion_moe.quantize_(model := copy.deepcopy(original), to)
    want = logits(model)
    model.save_pretrained(tmp_path / "saved")
    forms = {"mxfp4": ["modelopt", "compressed-tensors"], "int4": ["compressed-tensors"]}
    if (family, to) == ("gpt_oss", "mxfp4"):  # all experts in a tensor
        forms = {"mxfp4": ["modelopt"]}
    written = [tmp_path / "saved"]
    written += [convert(written[0], tmp_path / form, to=form) for form in forms.get(to, [])]
    for path in written:
        assert relative(logits(read(path)), want) <= 1e-6
        dense = convert(path, tmp_path / f"{path.name}-dense", to="dense")
        assert relative(logits(read_by(type(model), dense)), want) <= 1e-5


def test_names_stay_when_a_model_is_saved_again(tmp_path: Path):
    model = tiny("mixtral")
    fusion_moe.quantize_(model)
    saved = []
    for _ in range(2):
        model.save_pretrained(tmp_path)
        saved.append(Directory.open(tmp_path).tensors.keys())
    assert saved[0] == saved[1]
    assert any(name.endswith("experts.0.w1.weight") for name in saved[0])


# Families of which nobody knows how they store experts --------------------------------------------


def quantized(family: str, path: Path) -> Path:
    fusion_moe.quantize_(model := tiny(family))
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (lambda config: config.update(model_type="mistral5"), "'mistral5', of no known class"),
        (lambda config: config.pop("model_type"), "model_type None, of no known class"),
        (lambda config: config.update(n_routed_experts=2 * E), "4 experts; expected 8"),
        (lambda config: config.update(moe_intermediate_size=2 * I), "as the model"),
    ],
    ids=["unknown", "none", "experts", "size"],
)
def test_no_floats_that_no_class_reads(how: Callable[[Any], Any], match: str, tmp_path: Path):
    source = quantized("mistral4", tmp_path / "source")
    change_json(source / "config.json", how)
    with pytest.raises((UnsupportedError, fusion_moe.errors.CheckpointError), match=match):
        convert(source, tmp_path / "dense", to="dense")
    assert not (tmp_path / "dense").exists()


def test_a_class_that_comes_with_the_directory(tmp_path: Path):
    """Quantizers name experts after its modules, which it reads in floats."""
    source = quantized("deepseek_v3", tmp_path / "source")
    of_class = load_file(convert(source, tmp_path / "known", to="dense") / "model.safetensors")
    change_json(source / "config.json", lambda c: c.update(model_type="own", auto_map={"": "own"}))
    dense = load_file(convert(source, tmp_path / "dense", to="dense") / "model.safetensors")
    assert same_tensors(dense, of_class)


def test_a_way_of_storing_that_is_not_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every other row of an expert in a tensor of its own."""
    from fusion_moe.transformers import families

    def halves(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{name}.{i}": t[:, i::2] for name, t in state.items() for i in (0, 1)}

    source = quantized("mistral4", tmp_path / "source")
    monkeypatch.setattr(families, "revert_weight_conversion", halves)
    with pytest.raises(UnsupportedError, match=r"gate_up_proj.0 of .*; expected whole matrices"):
        convert(source, tmp_path / "dense", to="dense")


def test_layers_that_predict_further_tokens_keep_their_names(tmp_path: Path):
    source = quantized("deepseek_v3", tmp_path / "source")

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.1.mlp.experts" in name]:
            tensors[name.replace("layers.1", f"layers.{LAYERS}")] = tensors[name].clone()

    dense = load_file(
        convert(change(source, add), tmp_path / "dense", to="dense") / "model.safetensors"
    )
    for e in range(E):
        name = f"model.layers.1.mlp.experts.{e}.down_proj.weight"
        assert torch.equal(dense[name.replace("layers.1", f"layers.{LAYERS}")], dense[name])


def test_experts_of_each_tower(tmp_path: Path):
    """dots3_note: 4 experts in the text model, 8 in the vision tower, by other names."""
    found = family_of(Directory.open(quantized("dots3_note", tmp_path / "source"))).layers
    assert {
        name: (each.experts, each.hidden, each.intermediate) for name, each in found.items()
    } == {
        "model.language_model.layers.1.mlp.experts": (E, H, I),
        "model.vision_tower.blocks.1.mlp.experts": (2 * E, H, I),
    }
    names = {t.name for each in found.values() for t in each.floats if t.experts == (0,)}
    assert names == {
        *(f"model.layers.1.mlp.experts.0.{p}_proj.weight" for p in ("gate", "up", "down")),
        *(f"vision_encoder.blocks.1.mlp.experts.0.fc{i}.weight" for i in (1, 2, 3)),
    }


def test_files_of_either_order(tmp_path: Path):
    """Qwen3-VL's class reads matrices and transposed ones, of which published files are."""
    model = tiny("qwen3_vl_moe")
    model.config.text_config.moe_intermediate_size = 3 * I  # no square
    model = type(model)(model.config).eval()
    model.save_pretrained(tmp_path / "floats")
    whole = load_file(tmp_path / "floats" / "model.safetensors")
    turned = {
        n: t.mT.contiguous() if n.endswith(("gate_up_proj", "experts.down_proj")) else t
        for n, t in whole.items()
    }
    fusion_moe.quantize_(model)
    for name, tensors in (("as_saved", whole), ("turned", turned)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tmp_path / name / "config.json").write_text(
            (tmp_path / "floats" / "config.json").read_text()
        )
        assert same(read(quantize(tmp_path / name, tmp_path / f"{name}-4bit")), model)


def test_all_matrices_are_encoded():
    fusion_moe.quantize_(model := tiny("dots3_note"))
    assert sum(isinstance(m, PackedModule) for m in model.modules()) == 2
