"""A translation unit: segments, each in a namespace, with an entry for each, and one entry for a
whole program.

run_<i>(p, n, products, threads)    segment i: pointers and sizes as its Source lists them
run(p, n, products, threads)        all in order, in one parallel region, on the arrays and sizes of
                                    the program; stops at one that finds bad input
run_in(p, n, products, pool)        the same in the parallel region of a pool

products: the grouped product of each segment's encoding, null for one without.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..cxx import indented, inner
from .segment import Source

# C++ headers that are included only by texts with such words: they take longer to compile than most
# segments.
_WORDS = {
    "cmath": re.compile(
        r"\bstd::(fabs|sqrt|erfc|sin|cos|atan|floor|nearbyint)\b|\b(NAN|INFINITY)\b"
    ),
    "numeric": re.compile(r"\bstd::accumulate\b"),
    "vector": re.compile(r"\bstd::vector\b"),
}
_ARRAYS = "void* const* p, const long long* n, void* const* products"


@dataclass(frozen=True)
class Step:
    """The arguments of a segment in a program: the program's numbers for the segment's arrays and
    sizes.
    """

    arrays: Sequence[int]
    sizes: Sequence[int]


def text(sources: Sequence[Source], steps: Sequence[Step] = ()) -> str:
    """The C++ of segments; steps: those of all segments, if `run` is needed."""
    used = (h for h, words in _WORDS.items() if any(words.search(s.text) for s in sources))
    own = dict.fromkeys(header for source in sources for header in source.headers)
    parts = [*(f"#include <{h}>\n" for h in used), *(f'#include "{h}"\n' for h in own)]
    for i, source in enumerate(sources):
        parts += [
            f"namespace {{\nnamespace segment_{i} {{\n",
            source.text,
            f"}}  // namespace segment_{i}\n}}  // namespace\n",
            _entry(f"run_{i}", [f"return segment_{i}::run(p, n, {_product(i)}, pool);"]),
        ]
    if steps:
        calls = [line for i, step in enumerate(steps) for line in _call(i, step)]
        body = indented(
            ["ThreadPool& pool = *static_cast<ThreadPool*>(of_caller);", *calls, "return GOOD;"]
        )
        parts += [
            f'extern "C" int run_in({_ARRAYS}, void* of_caller) {{\n{body}\n}}\n',
            _entry("run", ["return run_in(p, n, products, &pool);"]),
        ]
    return "\n".join(parts)


def _entry(name: str, body: Sequence[str]) -> str:
    region = indented(
        ["return ThreadPool::run(threads, [&](ThreadPool& pool) -> int {", *inner(body), "});"]
    )
    return f'extern "C" int {name}({_ARRAYS}, int threads) {{\n{region}\n}}\n'


def _product(i: int) -> str:
    return f"reinterpret_cast<Product>(products[{i}])"


def _call(i: int, step: Step) -> list[str]:
    arrays, sizes = (
        ", ".join(f"{a}[{j}]" for j in numbers)
        for a, numbers in (("p", step.arrays), ("n", step.sizes))
    )
    return [
        "{",
        f"    void* const q[] = {{{arrays}}};",
        f"    const long long m[] = {{{sizes or 0}}};",
        f"    if (segment_{i}::run(q, m, {_product(i)}, pool) != GOOD) return BAD;",
        "}",
    ]
