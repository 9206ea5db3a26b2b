"""What fusion_moe.explain says of weights that are not in the layout of the target, and that
prepare_ then does it.
"""

from __future__ import annotations

import torch
from experts import experts_of_ones

import fusion_moe
from fusion_moe.layouts import W16x64
from fusion_moe.nn import GroupedSwiGLU

EXPERTS, TOKENS, TOP_K, HIDDEN = 2, 5, 2, 128
TILED = "fusion_moe.prepare_(model, 'cuda') reorders them to w16x64, the layout of cuda"
BACK = "fusion_moe.prepare_(model, 'cpu') reorders them to linear, the layout of cpu"


def layouts(
    module: torch.nn.Module, *args: torch.Tensor, target: str
) -> list[tuple[tuple[str, str], ...]]:
    """What is said of each segment; and the same in the table."""
    with torch.no_grad():
        report = fusion_moe.explain(module, *args, target=target)
    found = [s.layouts for f in report.fusions for s in f.segments if "grouped_mm" in s.ops]
    shown = " ".join(report.details().split())
    assert all(f"{layout} {what}" in shown for said in found for layout, what in said)
    assert ("weight layouts" in shown) == any(found)
    return found


def tokens() -> tuple[torch.Tensor, ...]:
    return (
        torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(TOKENS, TOP_K, dtype=torch.long),
        torch.ones(TOKENS, TOP_K),
    )


def test_what_prepare_would_do_is_said_until_it_is_done():
    module = experts_of_ones(EXPERTS, HIDDEN, 64)
    assert layouts(module, *tokens(), target="cuda") == [(("linear", TILED),)] * 2
    assert layouts(module, *tokens(), target="cpu") == [()] * 2
    fusion_moe.prepare_(module, "cuda")
    assert layouts(module, *tokens(), target="cuda") == [()] * 2
    assert layouts(module, *tokens(), target="cpu") == [(("w16x64", BACK),)] * 2
    fusion_moe.prepare_(module, "cpu")
    assert layouts(module, *tokens(), target="cpu") == [()] * 2


def test_weights_without_an_order_stay_and_why_is_said(monkeypatch):
    monkeypatch.setattr(W16x64, "why_not", lambda *_: "nvfp4 has no order")
    module = experts_of_ones(EXPERTS, HIDDEN, 64)
    why = "nvfp4 has no order"
    assert (
        layouts(module, *tokens(), target="cuda")
        == [(("linear", f"prepare_ leaves them as they are: {why}"),)] * 2
    )


def test_each_module_is_moved_by_itself():
    module = GroupedSwiGLU.from_float(
        *(torch.ones(EXPERTS, 32, HIDDEN) for _ in range(2)), torch.ones(EXPERTS, HIDDEN, 32)
    )
    args = (
        torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16),
        torch.tensor([2, TOKENS], dtype=torch.int32),
    )
    fusion_moe.prepare_(module.gate_up_proj, "cuda")
    assert layouts(module, *args, target="cuda") == [(), (("linear", TILED),)]


def test_targets_that_read_the_linear_layout_have_nothing_to_say():
    assert layouts(experts_of_ones(EXPERTS, HIDDEN, 64), *tokens(), target="sm_90") == [()]
