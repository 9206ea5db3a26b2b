"""What expert parallelism would take on more GPUs than were measured: a model on paper, from
measured kernels and published networks.

    python benchmarks/scaling.py                 writes the tables of docs/scaling.md

Nothing of it was run on several GPUs. For a layer of DeepSeek-V3's size, NVFP4, experts divided
evenly, uniform routing, as many tokens on each rank. A layer takes what a rank computes and what it
sends, one after the other: routing, attention and the shared expert are left out, and nothing
overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from h200_cells import MODELS, MULTIPLY, READ, Model
from page import put

# The mlp of DeepSeek-V3 takes 1.06 to 1.54 of its floor on an H200 (docs/performance/h200.md), and
# its three kernels some microseconds.
SLACK, LAUNCHES = 1.25, 10e-6
# NVIDIA H200 datasheet: NVLink 900 GB/s, both directions. InfiniBand NDR: 400 Gb/s a GPU. Shares of
# them that collectives reach: assumed.
NVLINK, NIC = 0.8 * 450e9, 0.9 * 50e9
# Of one collective, between a node's GPUs and between nodes: assumed. DeepEP publishes 77 us for
# 128 tokens to 8 ranks, 155 to 32.
INSIDE, BETWEEN = 12e-6, 25e-6
NODE, BF16 = 8, 2
TOKENS = (1, 8, 32, 128, 512, 2048)


@dataclass(frozen=True)
class Cell:
    """A layer on so many ranks, each with so many tokens."""

    model: Model
    ranks: int
    tokens: int

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // NODE)

    @property
    def row(self) -> float:
        """Bytes of a token."""
        return self.model.hidden * BF16

    def local(self) -> float:
        """Seconds of a rank's own experts: reading those that got a token, or multiplying."""
        experts = self.model.experts / self.ranks
        hit = experts * (
            1 - (1 - self.model.slots / self.model.experts) ** (self.tokens * self.ranks)
        )
        rows = self.tokens * self.model.slots
        flops = 2 * rows * sum(n * k for n, k in self.model.products("mlp"))
        return SLACK * max(hit * self.model.expert_bytes("mlp") / READ, flops / MULTIPLY) + LAUNCHES

    def gathered(self) -> float:
        """All-gather of tokens, reduce-scatter of partial sums: what
        `parallelize_(tokens="sharded")` does.
        """
        inside = (min(self.ranks, NODE) - 1) * self.nodes * self.tokens * self.row
        # a node's rows of others come in by eight cards
        between = (self.nodes - 1) * self.tokens * self.row
        return 2 * self._seconds(inside, between)

    def two_level(self) -> float:
        """All-to-all: a token's row goes once to each node that has one of its experts, and is
        passed on and added there.
        """
        slots = self.model.slots
        others = (self.nodes - 1) * (1 - (1 - 1 / self.nodes) ** slots)
        here = min(self.ranks, NODE)
        inside = (others + 1) * (here - 1) * (1 - (1 - 1 / here) ** (slots / self.nodes))
        return 2 * self._seconds(self.tokens * inside * self.row, self.tokens * others * self.row)

    def direct(self) -> float:
        """All-to-all: a row for each expert, straight to its rank, added up where the token is."""
        rows = self.tokens * self.model.slots
        outside = rows * (1 - 1 / self.nodes)
        inside = (rows - outside) * (1 - 1 / min(self.ranks, NODE))
        return 2 * self._seconds(inside * self.row, outside * self.row)

    def _seconds(self, inside: float, between: float) -> float:
        """Of bytes that a GPU takes in by NVLink and by its network card, one after the other."""
        return INSIDE + inside / NVLINK + (BETWEEN + between / NIC if self.nodes > 1 else 0)


WAYS: dict[str, Callable[[Cell], float]] = {
    "all-gather": Cell.gathered,
    "two-level": Cell.two_level,
    "direct": Cell.direct,
}


def line(cell: Cell) -> str:
    """A row of the table."""
    local, ways = cell.local(), {name: way(cell) for name, way in WAYS.items()}
    best = min(ways, key=lambda name: ways[name])
    times, layer = (
        " | ".join(f"{1e6 * s:,.0f}" for s in (local, *ways.values())),
        local + ways[best],
    )
    return (
        f"| {cell.tokens} | {times} | {best} | {ways[best] / layer:.0%} | "
        f"{cell.tokens * cell.ranks / layer:,.0f} |"
    )


def table(model: Model, ranks: int) -> str:
    """A layer on so many ranks."""
    held = model.experts / ranks * model.expert_bytes("mlp")
    head = [
        "tokens a rank",
        "local us",
        *(f"{name} us" for name in WAYS),
        "fastest",
        "its share",
        "tokens a second",
    ]
    title = f"{ranks} ranks, nodes of {NODE}; {held / 1e9:.2f} GB of a layer's experts on each:"
    lines = [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(line(Cell(model, ranks, tokens)) for tokens in TOKENS),
    ]
    return "\n".join([title, "", *lines])


def main() -> None:
    """Writes both tables."""
    page = put(
        "model",
        "scaling.py",
        "\n\n".join(table(MODELS["deepseek"], ranks) for ranks in (8, 32)),
        "scaling.md",
    )
    print(page)


if __name__ == "__main__":
    main()
