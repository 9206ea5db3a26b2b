"""The protocol by which ranks write into each other's memory (exchange/kernels/exchange.h), between
processes with delays, and without one of them. ThreadSanitizer sees the same code in threads.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from on_cpu import compiled

from fusion_moe.backends.cpu.readers import KERNELS
from fusion_moe.distributed import exchange, symmetric

pytestmark = [pytest.mark.compiler]


INCLUDE = f"-I{exchange.KERNELS}", f"-I{KERNELS}"
TEXT = Path(__file__).with_name("exchange.cpp").read_text()


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return compiled(tmp_path_factory.mktemp("exchange"), TEXT, *INCLUDE)


def said(program: Path, *arguments: object) -> list[str]:
    found = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=True
    )
    return (found.stdout + found.stderr).splitlines()


@pytest.mark.parametrize(
    ("ranks", "rounds"),
    [(2, 1_000), (4, 1_000), (1, 100), pytest.param(2, 10_000, marks=pytest.mark.exhaustive)],
)
def test_calls_with_delays(program, ranks, rounds):
    """Any numbers of tokens, and any capacity in each call."""
    assert said(program, ranks, rounds, 1) == ["good"] * ranks


@pytest.mark.parametrize(("ends_before", "waits_for"), [(1, 1), (3, 3)])
def test_a_rank_that_ends_is_named(program, ends_before, waits_for):
    """By all others, within the limit; what they call then does not wait again."""
    assert said(program, 3, "lost", ends_before) == [f"{waits_for} rank 2"] * 2 + [""]


def test_a_rank_in_another_layer_is_named(program):
    *others, last = said(program, 3, "disagrees")
    assert others == ["4 rank 2"] * 2
    assert last == "4 rank 0"


@pytest.mark.once
def test_no_race(tmp_path):
    """Every byte that ranks share is ordered by a flag."""
    made = compiled(tmp_path, TEXT, "-g", "-fsanitize=thread", *INCLUDE)
    assert said(made, 3, 300, 1, "threads") == ["good"] * 3


def test_room_is_what_the_kernels_use(tmp_path):
    """The bytes of a rank's memory."""
    text = (
        '#include <cstdio>\n#include <cstdlib>\n#include "exchange.h"\n'
        "int main(int, char** a) {\n"
        "    const i64 ranks = atoi(a[1]), tokens = atoi(a[2]), row = atoi(a[3]);\n"
        "    const Region region(0, ranks, tokens, row);\n"
        '    std::printf("%lld\\n", (long long)(region.end()));\n}\n'
    )
    made = compiled(tmp_path, text, *INCLUDE)
    for shape in (2, 1, 512), (4, 100, 14336), (8, 8192, 14336):
        (end,) = said(made, *shape)
        assert int(end) <= symmetric.region_bytes(*shape) < int(end) + 256
