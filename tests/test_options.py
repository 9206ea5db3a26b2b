"""Options: what keys and variables say, values that are none, and what the option log writes."""

from pathlib import Path

import pytest
import torch

from fusion_moe import options
from fusion_moe.errors import OptionError, did_you_mean, one_of


@pytest.mark.parametrize("value", ["launches", "launch,", "launch, compile"])
def test_a_word_that_no_option_knows(value):
    with pytest.raises(OptionError, match="option log = '.*'; expected one of passes, segments"):
        options.Options().replace(log=value)
    assert options.Options().replace(log="launch,compile").log == "launch,compile"


def test_an_option_is_not_assigned():
    before = options.current()
    for name in "target", "check":
        with pytest.raises(OptionError, match=rf"override\({name}=1\).*FUSION_MOE_{name.upper()}"):
            setattr(options, name, 1)
    with pytest.raises(OptionError, match="options.taget = 'cpu'.*did you mean 'target'"):
        options.taget = "cpu"
    assert options.current() == before


def test_names_in_other_letters_are_near():
    assert did_you_mean("NVFP4", ["int4", "nvfp4"]) == "did you mean 'nvfp4'?"
    many = [f"int{n}" for n in range(40)] + ["nvfp4"]
    assert one_of("nvfp5", many).startswith("one of nvfp4, ")
    assert one_of("nvfp5", many).endswith(" and 33 others")
    assert did_you_mean("rtx 3090", ["RTX 3090"]) == "did you mean 'RTX 3090'?"


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


def test_the_folder_is_no_part_of_keys():
    with options.override(cache_dir="/one"):
        one = options.current()
    with options.override(cache_dir="/two"):
        two = options.current()
        carried = options.from_key(one.key())
    assert (one, hash(one), one.key()) == (two, hash(two), two.key())
    assert "/one" not in one.key()
    assert carried.cache_dir == "/two"
    forced = one.replace(cpu_isa="generic")
    assert forced != one
    assert options.from_key(forced.key()) == forced
    assert '"' not in forced.key()  # torch's cpp_wrapper writes keys into C++


@pytest.mark.parametrize(
    "key", ["{'dump': '/anywhere'}", "{'cache_dir': '/anywhere'}", "{1: 2}", "{None: 1}"]
)
def test_what_no_key_says(key):
    """Keys come with exported graphs, from anybody."""
    with pytest.raises(OptionError, match="an option's name = .*; expected one of target, "):
        options.from_key(key)


def test_where_caches_belong(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert (
        options._cache_home({})
        == options._cache_home({"XDG_CACHE_HOME": "relative"})
        == "/home/someone/.cache/fusion_moe"
    )
    assert options._cache_home({"XDG_CACHE_HOME": "/elsewhere"}) == "/elsewhere/fusion_moe"
    assert options.from_environment({"FUSION_MOE_CACHE_DIR": "~/x"}).cache_dir == "~/x"
    assert options.from_environment({"FUSION_MOE_CACHE_DIR": ""}) == options.from_environment({})
    assert (
        options.from_environment({"FUSION_MOE_CACHE_DIR": ""}).cache_dir
        == options.Options().cache_dir
    )
    with options.override(cache_dir="~/x"), pytest.raises(OptionError):
        options.current().replace(cache_dir=Path("x"))


@pytest.mark.parametrize(("text", "found"), [("1", 1), ("1000000", 10**6), ("", 300)])
def test_how_long_a_compiler_may_take(text, found):
    read = options.from_environment({"FUSION_MOE_COMPILE_SECONDS": text})
    assert read.compile_seconds == found
    assert read == options.Options(), "it is no part of keys"


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1000001", "long", True, 2.0])
def test_a_time_that_is_none(value):
    with pytest.raises(
        OptionError, match="option compile_seconds = .*; expected an int from 1 to 1000000"
    ):
        options.Options().replace(compile_seconds=value)
