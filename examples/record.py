"""What happened in a run: the small model of this repository generates, and what its experts and
kernels did is printed, and saved as a page.

    python examples/record.py --out FOLDER      # writes run.html, run.json and run.trace.json there
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, logging as transformers_logging

import fusion_moe
from fusion_moe import NVFP4Config
from fusion_moe.transformers import from_pretrained, fuse_routers_

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
PROMPT, TOKENS = "def main():", 64


def main(folder: Path) -> None:
    transformers_logging.disable_progress_bar()
    model = from_pretrained(MODEL, dtype=torch.bfloat16, quantization_config=NVFP4Config()).eval()
    fuse_routers_(model)
    ids = AutoTokenizer.from_pretrained(MODEL)(PROMPT, return_tensors="pt").input_ids
    how = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    model.generate(ids, **how)  # compiles
    with fusion_moe.record(model) as run:
        model.generate(ids, **how)
    print(run)
    tokens, slots = ids.shape[1] + TOKENS - 1, model.config.num_experts_per_tok
    assert run.data.rows == tokens * slots * model.config.num_hidden_layers
    folder.mkdir(exist_ok=True)
    for name in ("run.html", "run.json", "run.trace.json"):
        run.save(folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(), help="a folder (default: this one)")
    main(parser.parse_args().out)
