"""Writes what tools/engines_gpu measured into benchmarks/results/serving.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from results import table, write

OURS, ADAPTERS = "fusion_moe", "adapters"
# kernels of experts: this library's, Humming's, Triton's, triton_kernels', Marlin's; no choice of
# experts
_EXPERTS = re.compile(
    "^(small_m|large_m|combine|route|reorder_activations)"
    "|humming|process_input|moe_align|count_and_sort|moe_fused_mul_sum"
    "|fused_moe_kernel|per_token_group_quant|act_and_mul|moe_sum"
    "|_matmul_ogs|_reduce_grouped|_combined_routing|_sum_bitmatrix|[mM]arlin"
)
Found = Mapping[str, Any]


def page(record: Found) -> Path:
    """Writes the page. record: what a run of this tool found."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [f"{versions}. Ratios: how many times as fast as the fastest of vLLM's own."]
    for title, kinds in record.get("engines", {}).items():
        if whole := {kind: found for kind, found in kinds.items() if "lengths" in found}:
            parts += [f"## {title}: engine", _engine(whole), *_numbers(whole)]
    for model, kinds in record.get("servers", {}).items():
        parts += [f"## {model}: server", _server(kinds), *_soaks(kinds)]
    for model, cases in record.get("cases", {}).items():
        parts += [f"## {model}: beside the clock", _cases(cases)]
    return write("serving", "tools/engines_gpu", *parts)


def _engine(kinds: Found) -> str:
    """A row for each kind of experts: medians by the clock, and times on the GPU."""
    first = next(iter(kinds.values()))
    cells = [*(("decode", n) for n in first["decode"]), ("prefill", None)]

    def of(found: Found, cell: tuple[str, Any], what: str) -> float:
        found = found[cell[0]] if cell[1] is None else found[cell[0]][cell[1]]
        if what == "clock":
            return statistics.median(found["ms"])
        if what == "GPU":
            return found["gpu_us"] / 1e3
        return sum(us for name, us in found["kernels"].items() if _EXPERTS.search(name)) / 1e3

    head = [first["gpu"], *(f"batch {n}" for n in first["decode"]), "prefill of 8,191"]
    rows = []
    here = bool(first["prefill"]["gpu_us"])
    for what in ("clock", "GPU", "GPU, experts alone") if here else ("clock",):
        times = {k: [of(found, cell, what) for cell in cells] for k, found in kinds.items()}
        others = [found for kind, found in times.items() if kind not in (OURS, ADAPTERS)]
        rows += [[f"{kind}, ms by the {what}", *map(_ms, found)] for kind, found in times.items()]
        if OURS in times and others:
            best = [min(found) for found in zip(*others, strict=True)]
            ratios = (b / t for b, t in zip(best, times[OURS], strict=True))
            rows.append([f"ratio by the {what}", *(f"{ratio:.2f}x" for ratio in ratios)])
        if adapted := kinds.get(ADAPTERS, {}).get("adapted"):
            found = (of(adapted, (n, None), what) for n in adapted)
            rows.append([f"{ADAPTERS}, in all requests, ms by the {what}", *map(_ms, found), ""])
    other = [
        [
            kind,
            f"{found['start_s']:.0f}",
            "" if found["reserved_gib"] is None else f"{found['reserved_gib']:.2f}",
            f"{found['lengths']['longest_extra_ms']:.0f}",
            f"{ratio:.2f}x" if (ratio := found["lengths"].get("longest_ratio")) else "",
        ]
        for kind, found in kinds.items()
    ]
    legend = "start, s", "memory without the cache, GiB", "longest extra of a new length, ms"
    legend += ("longest time of one, by the median",)
    return table(head, rows) + "\n\n" + table(["experts", *legend], other)


def _numbers(kinds: Found) -> Iterator[str]:
    """How ours differ from those of the others."""
    if OURS not in kinds:
        return
    for kind, found in kinds.items():
        if kind == OURS:
            continue
        pairs = list(zip(kinds[OURS]["numbers"], found["numbers"], strict=True))
        apart = [abs(a - b) for a, b in _pairs(kinds[OURS]["numbers"], found["numbers"])]
        same = sum(x["tokens"] == y["tokens"] for x, y in pairs)
        yield (
            f"Log-probabilities differ from those with {kind} by {statistics.mean(apart):.4f} on "
            f"average, {max(apart):.3f} at most; the same 24 tokens for {same} of {len(pairs)} "
            "prompts."
        )


def _server(kinds: Found) -> str:
    rows = []
    for kind, found in kinds.items():
        for clients in (key for key in found if key.isdigit()):
            of = found[clients]
            rows.append(
                [
                    f"{kind}, {clients} clients",
                    f"{of['median_ttft_ms']:.0f}, {of['p99_ttft_ms']:.0f}",
                    f"{of['median_itl_ms']:.1f}, {of['p99_itl_ms']:.1f}",
                    f"{of['output_throughput']:.0f}",
                    f"{found['start_s']:.0f}",
                ]
            )
    head = "median and p99 to the first token, ms", "between tokens, ms", "tokens/s", "start, s"
    return table(["", *head], rows)


def _soaks(kinds: Found) -> Iterator[str]:
    """How mixed requests went."""
    for kind, found in kinds.items():
        if "apart" in (soaked := found.get("soak", {})):  # it came to its end
            refused = ", ".join(f"{n} {how}" for how, n in sorted(soaked["malformed"].items()))
            median, high = (soaked["apart"][i] for i in (499, 989))
            gpu, host = soaked["grown_mib"]
            again = (
                f" After kill -9 a new server started in {soaked['restart_s']:.0f} s; its answers "
                f"to single requests: {soaked['apart after a restart']:.3f} apart at most."
                if "restart_s" in soaked
                else ""
            )
            yield (
                f"{kind}, {soaked['clients']} clients for {soaked['seconds']:.0f} s: "
                f"{soaked['answers']} answers, log-probabilities of 64 tokens apart from those of "
                f"single requests by at most {median:.3f} (median), {high:.3f} (99 %), "
                f"{soaked['most apart']:.3f} (all). Malformed: {refused}. Memory grew by {gpu} MiB "
                f"on the GPU, {host} on the host.{again}"
            )


def _cases(cases: Found) -> str:
    """A row for each: how far its answers are from plain ones, and what else it found."""
    plain, rows = cases.get("plain", {}).get("numbers"), []
    for name, found in cases.items():
        answers = found.get("numbers")
        apart = (
            f"{max(abs(a - b) for a, b in _pairs(answers, plain)):.4f}" if plain and answers else ""
        )
        more = {k: v for k, v in found.items() if k not in ("numbers", "awake", "flag")}
        rows.append([name, apart, "; ".join(f"{k}: {_told(v)}" for k, v in more.items())])
    return table(["", "log-probabilities of prompts apart from plain", "found"], rows)


def _told(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _pairs(found: Any, other: Any) -> Iterator[tuple[float, float]]:
    for x, y in zip(found, other, strict=True):
        yield from zip(x["logprobs"], y["logprobs"], strict=True)


def _ms(ms: float) -> str:
    return f"{ms:.3g}"
