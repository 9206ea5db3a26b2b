"""python -m tests.fuzz: random graphs around our operations, or hostile files and state dicts,
until so many or so long. Exit status 1 if anything was found.

evaluate   our front end, its passes and segments, evaluated, against eager: the cheapest level
traced     the same under torch.compile, on the graph that Inductor would compile; more rows, and
           backward
cxx        the regions' real C++, many in one library, against what their segments mean
sanitize   the same built with ASan and UBSan
hostile    programs whose texts were changed at random, those that still verify, on any bits, built
           with ASan and UBSan
files      directories of checkpoints changed at random: read, or refused in a sentence, soon and in
           little memory
states     state dicts changed at random: loaded as they are, or refused
inductor   torch.compile(backend="fusion_moe") as it is
"""

from __future__ import annotations

import argparse
import sys

from .run import LEVELS, fuzz


def main() -> int:
    """Runs what was asked for. -> exit status"""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--graphs", type=int, default=1000, help="how many")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long at most")
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow")
    parser.add_argument("--level", choices=LEVELS, default="evaluate")
    asked = parser.parse_args()
    result = fuzz(asked.level, asked.seed, asked.graphs, asked.seconds)
    ran = f"{result.graphs} graphs, {result.regions} programs in C++, {result.seconds:.0f} s"
    print(f"{asked.level}: {ran}, {len(result.faults)} kinds of faults")
    for name, found in sorted(result.faults.items(), key=lambda item: -len(item[1])):
        print(f"  {len(found)} x {name}  (seeds {', '.join(str(f['seed']) for f in found[:5])})")
    return bool(result.faults)


if __name__ == "__main__":
    sys.exit(main())
