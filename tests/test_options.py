"""Options that are lists of words, and what the option log writes."""

import pytest
import torch

from fusion_moe import options
from fusion_moe.errors import OptionError


@pytest.mark.parametrize("value", ["launches", "launch,", "launch, compile"])
def test_a_word_that_no_option_knows(value):
    with pytest.raises(OptionError, match="option log = '.*'; expected one of passes, segments"):
        options.Options().replace(log=value)
    assert options.Options().replace(log="launch,compile").log == "launch,compile"


def test_log(capfd):
    def call(log: str) -> str:
        x = torch.arange(float(rows * 4)).view(rows, 4)
        with options.override(log=log, target="cpu"):
            torch.ops.fusion_moe.scaled_swiglu(x)
        return capfd.readouterr().err

    rows = 7
    assert call("") == ""
    said = call("launch")
    assert said == f"fusion_moe launch: 1 segments, {{'s0': {rows}}}\n"
    with options.override(contract_rounding=False):  # a program of its own
        said = call("passes,segments")
    for part in "passes: translated\n", "passes: simplify\n", "segments: 0 [pointwise, cpu], ":
        assert f"fusion_moe {part}" in said
    assert "launch" not in said
