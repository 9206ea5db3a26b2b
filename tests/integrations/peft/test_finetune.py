"""examples/finetune.py does what it says; TRL's trainers on encoded experts give the losses that
they give on the model decoded to floats.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cover import few

pytest.importorskip("transformers")

from test_peft_functions import config, decoded, quantized
from tiny_qwen3 import qwen3_moe

EXAMPLE = Path(__file__).parents[3] / "examples" / "finetune.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.judges("peft", "accelerate"),
    pytest.mark.filterwarnings("ignore"),  # those of other packages about themselves
]


# Runs a program whose kernels are those that tests have compiled.
RUN = """
import runpy, sys
import precompiled
precompiled.use()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The example, and its options for given ones."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{RUN}", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    program = runpy.run_path(str(EXAMPLE))

    def options(*given: Any) -> Any:
        asked = ["--out", tmp_path, "--steps", 4, "--sequence", 32, "--held-out", 2, *given]
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, asked)])
        return program["options"]()

    yield program, options
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def text(tmp_path):
    """Files to hold out and to learn from: docs/ changes, and the losses of four steps with it."""
    held_out, train = tmp_path / "held_out", tmp_path / "text"
    for file in held_out, train:
        file.write_text("".join(f"{i} and {i} are {2 * i}.\n\n" for i in range(400)))
    return "--text", held_out, train


def test_small(example, text, capsys):
    program, options = example
    assert program["small"](options("--small", "--save-every", 2, *text))
    shown = capsys.readouterr().out
    assert "killed: goes on from checkpoint-2" in shown
    assert "resumed: 4 losses are equal: yes" in shown
    assert "NO" not in shown


def test_both_bases_have_the_same_numbers(example, text):
    program, options = example
    found = {}
    for base in "nvfp4", "bf16":
        args = options("--config", "tiny", "--layers", 1, "--base", base, *text)
        program["measure"](args)
        found[base] = program["json"].loads((args.out / f"{base}-0.json").read_text())
    ours, theirs = (found[base]["losses"] for base in ("nvfp4", "bf16"))
    assert ours == pytest.approx(theirs, rel=2e-3)


TEXT = [{"text": f"def f{i}(x):\n    return x + {i}\n"} for i in range(6)]
PAIRS = [
    {"prompt": f"def f{i}(x):\n", "chosen": f"    return x + {i}\n", "rejected": f"    f{i} += x\n"}
    for i in range(6)
]


def sft(**how: Any) -> tuple[Any, ...]:
    trl = pytest.importorskip("trl")
    return trl.SFTTrainer, trl.SFTConfig, TEXT, how


def dpo() -> tuple[Any, ...]:
    trl = pytest.importorskip("trl")
    return trl.DPOTrainer, trl.DPOConfig, PAIRS, {}


@pytest.mark.parametrize(
    "method",
    few([sft, lambda: sft(packing=True, max_length=32), dpo]),
    ids=["sft", "packed", "dpo"],
)
def test_trl(method, tmp_path):
    trainer, arguments, data, how = method()
    from datasets import Dataset
    from transformers import AutoTokenizer

    original = qwen3_moe(vocab_size=2048)
    found = []
    for model in quantized(original), decoded(quantized(original), original):
        args = arguments(
            str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=len(data),
            learning_rate=2e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            **how,
        )
        torch.manual_seed(0)
        training = trainer(
            model,
            args=args,
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(EXAMPLE.parent / "tiny_qwen3_moe"),
            peft_config=config(),
        )
        training.train()
        found.append([e["loss"] for e in training.state.log_history if "loss" in e])
    assert len(found[0]) == 4
    assert found[0][-1] < found[0][0]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
