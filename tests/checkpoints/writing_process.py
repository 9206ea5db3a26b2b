"""Converts a directory slowly, for tests that kill it: a line on stdout as each shard begins, and a pause.

python writing_process.py SRC DST SHARD_BYTES SECONDS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fusion_moe.checkpoints import convert, writing
from fusion_moe.checkpoints.shard import Step

write_shard = writing.write_shard


def slowly(path: Path, steps: Sequence[Step]) -> str:
    """As `write_shard`, with a pause in the middle of the file."""

    def pause() -> dict:
        print(path.name.removesuffix(".unfinished"), flush=True)
        time.sleep(float(sys.argv[4]))
        return steps[-1].make()

    return write_shard(path, [*steps[:-1], Step(steps[-1].planned, pause)])


if __name__ == "__main__":
    writing.write_shard = slowly
    convert(sys.argv[1], sys.argv[2], shard_bytes=int(sys.argv[3]))
    print("written", flush=True)
