"""fusion-moe explain: the model of a directory on fake tensors, in both phases, on targets that are
not here.
"""

import json
import re

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from files import MADE, change, change_json, copied
from typer.testing import CliRunner

from fusion_moe.cli.app import app
from fusion_moe.runtime import nvrtc

DIRECTORIES = sorted(path.name for path in MADE.iterdir() if (path / "config.json").exists())


def run(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


def found(*arguments: str):
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def in_both_lanes(name: str) -> bool:
    """One of each way in which experts are stored: which models there are depends on transformers,
    the same in both.
    """
    return name in ("modelopt-mixtral", "ct-gpt_oss", "mxfp4-gpt_oss") or name.startswith("bf16")


@pytest.mark.parametrize(
    "name",
    [pytest.param(d, marks=[] if in_both_lanes(d) else [pytest.mark.once]) for d in DIRECTORIES],
)
def test_every_directory(name):
    """The products of experts are fused, in the encoding of the files."""
    if name.startswith("bf16") and torch.__version__ < "2.13":
        result = run(str(MADE / name))
        assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
        return
    report = found(str(MADE / name), "--target", "cpu")
    experts = [
        f for f in report["fusions"] if any("route" in segment["ops"] for segment in f["segments"])
    ]
    assert experts
    assert (
        sum(
            op == "grouped_mm"
            for f in experts
            for segment in f["segments"]
            for op in segment["ops"]
        )
        >= 2
    )
    encoded = {"int4": "bf16[", "mxfp4": "f8e8m0[", "bf16": "bf16["}
    scale = next((scale for word, scale in encoded.items() if word in name), "f8e4m3[")
    assert any(
        scale in given for f in experts for segment in f["segments"] for given in segment["inputs"]
    )


def test_phases_and_targets():
    folder = str(MADE / "modelopt-mixtral")
    asked = (
        ("--phase", "decode"),
        (),
        ("--tokens", "40"),
        ("--phase", "prefill", "--tokens", "40"),
        ("--phase", "prefill"),
    )
    reports = [found(folder, *options, "--batch", "3") for options in asked]
    rows = [r["fusions"][-1]["segments"][-1]["outputs"][0] for r in reports]
    assert [re.search(r"\[3, (\d+), ", row)[1] for row in rows] == ["1", "1", "40", "40", "512"]
    refused = run(folder, "--phase", "decode", "--tokens", "40")
    assert (
        refused.exit_code,
        "--tokens 40 with --phase decode; expected --phase prefill" in refused.stderr,
    ) == (2, True)
    assert run(folder, "--target", "nope").exit_code == 2
    both = run(folder, "--target", "cpu", "--gpu", "H100")
    assert (both.exit_code, "gpu = 'H100' for the target 'cpu'" in both.stderr) == (2, True)
    assert run(folder, "--tokens", "40").stdout.startswith(
        "prefill: 1 sequence of 40 tokens\n\nfusion_moe.explain: 1 graph"
    )


def test_a_gpu_that_is_absent(monkeypatch):
    """Which kernels it would get does not depend on what is installed to compile them."""
    folder = str(MADE / "modelopt-mixtral")
    with_nvrtc = found(folder, "--gpu", "H100")
    assert "H100" in json.dumps(with_nvrtc)
    monkeypatch.setattr(nvrtc, "why_missing", lambda: "cuda-bindings is not installed")
    assert found(folder, "--gpu", "H100") == with_nvrtc


def test_no_weight_is_read(tmp_path):
    """Other numbers, the same report."""
    want = found(str(MADE / "modelopt-mixtral"))
    spoiled = change(
        copied("modelopt-mixtral", tmp_path),
        lambda tensors: [t.flatten().view(torch.uint8).fill_(0xFF) for t in tensors.values()],
    )
    assert found(str(spoiled)) == want


def test_models_that_transformers_lacks_exit_with_3(tmp_path):
    folder = copied("modelopt-mixtral", tmp_path)
    change_json(folder / "config.json", lambda config: config.update(model_type="another"))
    result = run(str(folder))
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "another" in result.stderr


def test_the_summary_the_details_and_files(tmp_path):
    folder, file = str(MADE / "modelopt-mixtral"), tmp_path / "report.json"
    short = run(folder, "--target", "cpu", "--save", str(file)).stdout
    assert "--details" in short
    assert short.endswith(f"saved: {file}\n")
    assert json.loads(file.read_text())["target"] == "cpu"
    assert "source lines\n" in run(folder, "--target", "cpu", "--details").stdout
    assert run(folder, "--save", str(tmp_path / "report.pdf")).exit_code == 2
