"""Writes docs/report.png, the picture in docs/explain.md: the page of a report, in Chromium.

pip install playwright; python tools/report_picture.py [--chromium /usr/bin/chromium]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fusion_moe
from fusion_moe.report.report import Report

PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
WIDTH, HEIGHT = 1280, 1290


def report() -> Report:
    """Of a small model."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=512,
        moe_intermediate_size=512,
        num_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=2,
    )
    model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    fusion_moe.quantize_(model)
    with torch.inference_mode():
        return fusion_moe.explain(model, torch.randint(256, (1, 16)))


def main() -> None:
    """Opens the page, selects the first segment, and takes the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "report.html"
        report().save(file)
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(file.as_uri())
        page.click(".box >> nth=0")
        page.mouse.move(WIDTH - 1, 0)  # away from what it would explain
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
