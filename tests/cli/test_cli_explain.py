"""fusion-moe explain: the model of a directory on fake tensors, for targets that are not here."""

import json

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from files import MADE, change, change_json, copied
from typer.testing import CliRunner

from fusion_moe.cli.app import app
from fusion_moe.cli.explain import model_of
from fusion_moe.nn import Experts
from fusion_moe.runtime import nvrtc
from tests.families.tiny import tiny

DIRECTORIES = sorted(path for path in MADE.iterdir() if (path / "config.json").exists())
MIXTRAL = str(MADE / "modelopt-mixtral")


def run(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


def found(*arguments: str):
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("path", DIRECTORIES, ids=[path.name for path in DIRECTORIES])
def test_the_model_of_every_directory(path):
    """Its experts are the modules that are loaded, without memory."""
    model = model_of(path)
    assert all(t.is_meta for t in model.parameters())
    encoded = any(isinstance(m, Experts) for m in model.modules())
    assert encoded != path.name.startswith(("bf16", "bnb-qwen3_moe-linear"))


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("ct-gpt_oss", "f8e4m3["),
        ("mxfp4-gpt_oss", "f8e8m0["),
        ("ct-qwen3_moe-int4", "bf16["),
        ("bf16-qwen3_moe", "bf16["),
    ],
)
def test_products_are_fused_in_the_encoding_of_the_files(name, scale):
    shown = run(str(MADE / name), "--target", "cpu", "--details").stdout
    assert "source lines\n" in shown
    segments, _, types = shown.partition("types\n")
    assert ("experts_implementation='fusion_moe'" in segments) == name.startswith("bf16")
    assert "route" in segments
    assert segments.count("grouped_mm") >= 2
    assert scale in types.partition("->")[0]


def test_an_absent_gpu_a_prompt_and_a_file(tmp_path, monkeypatch):
    """Which kernels it would get does not depend on what is installed to compile them."""
    monkeypatch.setattr(nvrtc, "why_missing", lambda: "cuda-bindings is not installed")
    file = tmp_path / f"{'report' * 20}.json"  # longer than a line
    asked = ("--tokens", "40", "--batch", "3", "--gpu", "H100", "--save", str(file))
    shown = run(MIXTRAL, *asked).stdout
    assert shown.startswith("3 sequences of 40 tokens\n\nfusion_moe.explain: 1 graph")
    assert "--details" in shown
    assert shown.endswith(f"saved: {file}\n")
    fusion = json.loads(file.read_text())["fusions"][-1]
    assert fusion["gpu"].startswith("H100")
    assert "[3, 40, " in fusion["segments"][-1]["outputs"][0]
    assert "small_m" in fusion["segments"][0]["launched"]


def test_what_is_not_there():
    assert run(MIXTRAL, "--target", "nope").exit_code == 2
    both = run(MIXTRAL, "--target", "cpu", "--gpu", "H100")
    assert (both.exit_code, "gpu = 'H100' for the target 'cpu'" in both.stderr) == (2, True)


def test_no_weight_is_read(tmp_path):
    """Other numbers, the same report but for the minute that it was made in."""
    spoiled = change(
        copied("modelopt-mixtral", tmp_path),
        lambda tensors: [t.flatten().view(torch.uint8).fill_(0xFF) for t in tensors.values()],
    )
    assert found(str(spoiled)) | {"made": ""} == found(MIXTRAL) | {"made": ""}


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", -1), ("head_dim", 1.5), ("pad_token_id", 10**9), ("hidden_act", "nope")],
)
def test_a_configuration_of_no_model_is_a_sentence(name, value, tmp_path):
    """Whatever transformers and torch raise for it."""
    folder = copied("modelopt-qwen3_moe", tmp_path)
    change_json(folder / "config.json", lambda config: config.update({name: value}))
    result = run(str(folder))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert result.stderr.startswith(f"fusion-moe: {folder}: ")


def test_models_that_transformers_lacks_exit_with_3(tmp_path):
    folder = copied("modelopt-mixtral", tmp_path)
    change_json(folder / "config.json", lambda config: config.update(model_type="another"))
    result = run(str(folder))
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "another" in result.stderr


def test_a_model_of_several_is_not_called(tmp_path):
    """A thinker and a talker, say."""
    tiny("qwen3_omni_moe").save_pretrained(tmp_path)
    result = run(str(tmp_path))
    assert result.exit_code == 3
    assert "a Qwen3OmniMoeForConditionalGeneration, of several models" in result.output
