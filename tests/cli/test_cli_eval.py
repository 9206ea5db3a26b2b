"""fusion-moe eval, and inspect --against, on the small real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

import torch
from files import MADE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from fusion_moe import options
from fusion_moe.cli.app import app

MODEL = Path(__file__).parents[2] / "examples" / "tiny_qwen3_moe"


def run(*arguments: object):
    with options.override(target="reference"):
        return CliRunner(env={"COLUMNS": "100"}).invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    dst = tmp_path_factory.mktemp("eval") / "int4"
    assert run("quantize", MODEL, dst, "--to", "int4", "--skip", "*.layers.0.*").exit_code == 0
    return dst


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": Path(__file__).read_text()[:600]}) + "\n")
    return file


def test_json(quantized, text):
    result = run("eval", quantized, "--text", text, "--against", MODEL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == "fusion_moe.eval/1"
    assert 1 < found["bits_per_byte"] < 4
    assert 0 < found["difference"]["kl"] < 0.2
    routers = found["difference"]["routers"]
    assert len(routers) == 4
    assert routers["model.layers.1.mlp.experts"] == 1  # behind layer 0, which is in floats
    assert "losses" not in found


def test_text(quantized, text):
    result = run("eval", quantized, "--text", text, "--window", 64)
    assert result.exit_code == 0, result.output
    assert "bits per byte" in result.stdout
    assert "change from" not in result.stdout
    assert "KL" not in result.stdout
    assert result.stdout.splitlines()[2].startswith("bits per byte")


@pytest.mark.parametrize("command", ["eval", "run"])
def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows(command, text, tmp_path):
    """As one with added tokens beside a model that was not resized."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL, vocab_size=96, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    asked = ("--text", text) if command == "eval" else ("def main():", "--tokens", 2)
    result = run(command, tmp_path, *asked)
    assert (result.exit_code, result.stdout.strip()) == (1, "")
    said = result.stderr.splitlines()[-1]
    assert said.startswith("fusion-moe: the tokenizer's id ")
    assert "expected ids below 96, the rows of the model's embedding" in said


def test_without_a_tokenizer(text):
    result = run("eval", MADE / "modelopt-mixtral", "--text", text)
    assert result.exit_code == 1
    assert result.stderr == (
        f"fusion-moe: {MADE / 'modelopt-mixtral'}: no tokenizer; expected tokenizer.json, or "
        "another file of one; copy it from the original model\n"
    )


def test_files_that_are_no_text(quantized, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"txt": 1}\n')
    for name in ("nothing.txt", "broken.jsonl"):
        result = run("eval", quantized, "--text", tmp_path / name)
        assert result.exit_code == 2
        assert f"--text {tmp_path / name}: " in result.stderr
        assert result.stderr.count("nothing") == ("nothing" in name)


def test_errors_of_layers(quantized):
    result = run("inspect", quantized, "--against", MODEL, "--json")
    assert result.exit_code == 0, result.output
    errors = json.loads(result.stdout)["errors"]
    assert [e["name"] for e in errors] == [f"model.layers.{i}.mlp.experts" for i in (1, 2, 3)]
    assert all(0.08 < e["error"] <= e["largest"] < 0.11 for e in errors)
    assert all(e["worst"].startswith(e["name"]) for e in errors)
    shown = run("inspect", quantized, "--against", MODEL)
    assert "scales by mse" in shown.stdout
    wrong = run("inspect", quantized, "--against", quantized.parents[0] / "none")
    assert wrong.exit_code == 1
