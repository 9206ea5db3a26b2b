"""The real nvFuser compiles definitions for compute capability 10.0 and 9.0, and launches them, on
a device that is pretended.

A choice of them, since each takes some seconds: launched.py takes all that the tests make.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from launched import keep
from test_nvfuser import (
    I,
    call,
    copies,
    expert_mlp_of_sorted_rows,
    mxfp8_product,
    of_problem,
    sort,
    weight,
)

from fusion_moe import FusionDefinition
from fusion_moe.backends import TARGETS
from fusion_moe.compile import lower
from fusion_moe.errors import UnsupportedError
from fusion_moe.integrations.nvfuser.headers import check_headers
from fusion_moe.options import Options

TOOL = Path(__file__).resolve().parents[3] / "tools" / "pretended_gpu"
PROGRAM = Path(__file__).with_name("launched.py")
SIZES = {"s0": 11, "m": 11}

pytestmark = [pytest.mark.nvfuser, pytest.mark.compiler]


def thunders(activation_format):
    return call(
        "f16a_nvfp4weight_scaled_grouped_mm", of_problem(), activation_format=activation_format
    )


def linear():
    """Decode scales that differ along N, and block scales that the definition swizzles or
    decodes.
    """
    args = of_problem()
    ends = args[4] + args[6][:, 0]
    return call("nvfp4_grouped_mm", [args[0], *weight(2 * I, args[0].shape[1], runs=2), ends])


def kept(fusion, target, folder):
    """The one definition that a program becomes."""
    (segment,) = lower(fusion, TARGETS[target], Options()).segments
    return keep(segment.fusion, target, SIZES, folder).name


def launched(capability, folder):
    """What came of each definition, and how often each line stands in the log."""
    (log := folder / "log").touch()
    command = [sys.executable, TOOL, "--log", log, capability, PROGRAM, folder]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    said = dict(reversed(line.strip().rsplit(" ", 1)) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stdout + done.stderr
    return said, Counter(log.read_text().splitlines())


def cutlass(log, *words):
    """How often a kernel of CUTLASS was launched whose name has all these words."""
    return sum(
        n
        for line, n in log.items()
        if line.startswith("library _ZN7cutlass") and all(word in line for word in words)
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_blackwell(more, tmp_path):
    """4-bit products are the block-scaled kernel of e2m1 numbers with e4m3 scales, 16-bit ones that
    of bf16.
    """
    made = {
        kept(thunders("nvfp4"), "sm_100", tmp_path): 1,
        kept(mxfp8_product(), "sm_100", tmp_path): 0,
    }
    if more:
        made |= {
            kept(expert_mlp_of_sorted_rows(False), "sm_100", tmp_path): 2,
            kept(copies([2, 64, 8], "mxfp8_columns"), "sm_100", tmp_path): 0,
        }
    said, log = launched("10.0", tmp_path)
    assert said == dict.fromkeys(made, "launched")
    assert not log["refused sm_100a"]
    assert log["compiled sm_100a"] >= len(made)
    assert cutlass(log, "Sm100", "BlockScaled", "float_e2m1_t", "float_ue4m3_t") == sum(
        made.values()
    )
    assert cutlass(log, "Sm100", "bfloat16_t") - cutlass(log, "BlockScaled", "bfloat16_t") == 1


def bias_of_one_group():
    return call(
        "group_add", [torch.zeros(11, 8), torch.zeros(1, 8), torch.tensor([11], dtype=torch.int32)]
    )


def one_row_of_one_group():
    """Every size is 1, so much of it is a broadcast."""
    fd = FusionDefinition()
    x, offs = fd.define_tensor(shape=[1, 5], dtype="f32"), fd.define_tensor(shape=[1], dtype="i32")
    ends = fd.groups_of(offs, 1)
    fd.add_output(
        fd.ops.reshape(fd.ops.zero_rest(fd.ops.partition(x, ends), ends), new_shape=(1, 5))
    )
    return fd.fusion()


def constants():
    """A segment that reads nothing, as beside others in a program."""
    fd = FusionDefinition()
    fd.add_output(fd.ops.full(shape=(3,), fill_value=1.0, dtype="f32"))
    return fd.fusion()


@pytest.mark.slow
def test_hopper(tmp_path):
    """A sort compiles, or says which headers it needs."""
    products = [kept(f, "sm_90", tmp_path) for f in (thunders("bf16"), linear(), mxfp8_product())]
    others = [
        kept(f, "sm_90", tmp_path)
        for f in (bias_of_one_group(), one_row_of_one_group(), constants())
    ]
    sorted_ = kept(sort(), "sm_90", tmp_path)
    try:
        check_headers()
        of_sort = "launched"
    except UnsupportedError:
        of_sort = "needs headers"
    said, log = launched("9.0", tmp_path)
    assert said == {
        **dict.fromkeys(products, "compiled"),
        **dict.fromkeys(others, "launched"),
        sorted_: of_sort,
    }
    assert not log["refused sm_90a"]
    # constants need no kernel of nvFuser's
    assert log["compiled sm_90a"] >= len(products) + len(others) - 1


@pytest.mark.parametrize("wrong", [[], ["10"], ["ten", "x.py"], ["10.0"]])
def test_what_the_tool_wants(wrong):
    done = subprocess.run([sys.executable, TOOL, *wrong], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.search(
        r"usage: pretended_gpu.*required: capability|a compute capability, as in "
        r"10\.0, and a program",
        done.stderr,
        re.S,
    )


def test_nvml_sees_the_same_device():
    """As what asks it before torch makes a context: vLLM."""
    program = """
import ctypes, torch
nvml = ctypes.CDLL("libnvidia-ml.so.1")
count, major, minor, device = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
name, sizes, by = ctypes.create_string_buffer(96), (ctypes.c_uint64 * 3)(), ctypes.byref
for function, *arguments in (
    ("InitWithFlags", 0),
    ("DeviceGetCount_v2", by(count)),
    ("DeviceGetHandleByIndex_v2", 0, by(device)),
    ("DeviceGetCudaComputeCapability", device, by(major), by(minor)),
    ("DeviceGetName", device, name, len(name)),
    ("DeviceGetMemoryInfo", device, sizes),
):
    assert getattr(nvml, "nvml" + function)(*arguments) == 0, function
assert nvml.nvmlDeviceGetHandleByIndex_v2(1, by(device)) != 0
known = torch.cuda.get_device_properties(0)
assert count.value == torch.cuda.device_count() == 1
assert (major.value, minor.value) == (known.major, known.minor) == (9, 0)
assert (name.value.decode(), sizes[0]) == (known.name, known.total_memory)
assert sizes[1] + sizes[2] == sizes[0]
"""
    subprocess.run([sys.executable, str(TOOL), "9.0", "-c", program], check=True)
