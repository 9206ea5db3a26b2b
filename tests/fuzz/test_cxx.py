"""The C++ of many random programs in one library: against what their segments mean; and built with
ASan and UBSan, changed at random, on any bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings

from fusion_moe import options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import compile_fusion
from fusion_moe.options import Options
from fusion_moe.runtime import isa

from .batch import Batch
from .case import case_of
from .compare import agree, outcome
from .regions import Evaluated

pytestmark = [
    *(pytest.mark.once, pytest.mark.slow, pytest.mark.compiler),
    pytest.mark.exhaustive,
]


@pytest.mark.parametrize("first", range(1000, 1000 + settings().max_examples * 4 // 5, 24))
def test_kernels_compute_what_their_segments_mean(first):
    """In one call and kernel by kernel, with roundings between operations and without."""
    tier, compiled = isa.selected(), []
    for seed in range(first, first + 24):
        case, contract = case_of(Random(seed)), seed % 2 == 0
        with_ = Options().replace(cpu_isa=tier, contract_rounding=contract)
        for run in Evaluated(case).runs:
            if not run.quantizes:
                compiled.append((run, contract, compile_fusion(run.fusion, TARGETS["cpu"], with_)))
    with options.override(cpu_isa=tier):
        assert Batch([program for *_, program in compiled], tier)._loaded
    for run, contract, program in compiled:
        want = outcome(lambda run=run, contract=contract: run.by_segments(contract))
        sizes = program.sizes(run.inputs, run.sizes)
        for call in (program, program._one_by_one):
            found = outcome(lambda call=call, run=run, sizes=sizes: call(run.inputs, sizes))
            agree(found, want, run.rough)


@pytest.mark.parametrize("first", range(2000, 2000 + settings().max_examples // 6, 5))
def test_nothing_is_read_or_written_outside_of_a_tensor(first):
    libraries = [
        Path(subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip())
        for name in ("libasan.so", "libstdc++.so")  # the second throws what the first wants to see
    ]
    if not all(path.is_absolute() for path in libraries):
        pytest.skip("no libasan beside g++")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FUSION_MOE_CACHE_DIR": options.current().cache_dir,
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": " ".join(str(path.resolve()) for path in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.sanitized", str(first), str(first + 5)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
