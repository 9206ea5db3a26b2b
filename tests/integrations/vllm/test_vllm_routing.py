"""vLLM's own capture of routed experts, around layers of this library: what transformers' model of
the same directory records, and replays.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from files import MADE
from served import ENVIRONMENT

from fusion_moe.routing import Routing, record_routing, replay_routing
from fusion_moe.transformers import from_pretrained

PROMPTS = [[3, 9, 27, 20, 5, 11, 30], [8, 4]]


@pytest.mark.slow
def test_what_vllm_captures_is_replayed() -> None:
    directory = MADE / "modelopt-qwen3_moe"
    script = Path(__file__).with_name("routed.py")
    command = [sys.executable, script, directory, json.dumps(PROMPTS)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    model = from_pretrained(directory, dtype=torch.float32)
    sequences = []
    for prompt, (dtype, ids) in zip(PROMPTS, json.loads(line.removeprefix("FOUND ")), strict=True):
        captured = torch.tensor(ids, dtype=getattr(torch, dtype.removeprefix("torch.")))
        sequences.append(Routing.from_vllm(captured.numpy(), model))
        with record_routing(model) as recorded, torch.no_grad():
            model(input_ids=torch.tensor([prompt]))
        for name in recorded.called:
            got, want = sequences[-1].rows(name)[0], recorded.rows(name)[0]
            assert got.sort(1).values.tolist() == want.sort(1).values.tolist()
    packed = Routing.packed(sequences, [len(prompt) + 1 for prompt in PROMPTS])
    given = torch.tensor([[*PROMPTS[0], 1, *PROMPTS[1], 1]])
    with replay_routing(model, packed), record_routing(model) as seen:
        model(input_ids=given).logits.sum().backward()
    for name in seen.called:
        ids = packed.rows(name)[0].long()
        assert torch.equal(torch.where(ids < 0, seen.rows(name)[0], ids), seen.rows(name)[0])
