"""The glossary of the page."""

from __future__ import annotations

from ..data import ReportData
from .markup import Html, element, section

WORDS = (
    ("fusion", "A region of the model that became one program."),
    (
        "segment",
        "What one kernel computes; the program is divided into segments where one kernel "
        "cannot go on.",
    ),
    (
        "boundary",
        "Why a segment begins where it does, and is not one with those that it reads from.",
    ),
    ("IR", "The program in fusion_moe's intermediate representation, with the type of each value."),
    ("group", "The rows of one expert. How many they are, only the device knows."),
    ("flops fused", "Floating-point operations in fusions, of all in the graphs."),
    (
        "bytes fused",
        "Bytes that the calls in fusions would read and write as kernels of their "
        "own, of those of all calls.",
    ),
    (
        "read, written",
        "Bytes of a segment's inputs and outputs, each once; of grouped weights, at "
        "most one group per row.",
    ),
    ("avoided", "Traffic between operations that separate kernels would have caused."),
    (
        "memory bound",
        "The time to read a kernel's inputs at the machine's read bandwidth. A "
        "compute-bound kernel stays far from it.",
    ),
    (
        "plain torch",
        "The reference: a segment without a kernel is computed by torch's operations, one by one.",
    ),
    ("emitted, unexecuted", "Made for a target that cannot run here."),
    ("?", "A size that only the device knows."),
)


def glossary(report: ReportData) -> Html:
    """The definitions of the terms that the page uses."""
    return section(
        "Glossary",
        element(
            "dl",
            *(element("div", element("dt", word), element("dd", said)) for word, said in WORDS),
        ),
    )
