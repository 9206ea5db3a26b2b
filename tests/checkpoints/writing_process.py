"""Converts a directory, for tests that kill it: a line on stdout in the middle of each shard, and a
long wait in one of them.

python writing_process.py SRC DST SHARD_BYTES SHARD    # SHARD: the number of the one it waits in,
                                                       from 1
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fusion_moe.checkpoints import convert, writing
from fusion_moe.checkpoints.shard import Step

write_shard = writing.write_shard


def waiting(path: Path, steps: Sequence[Step]) -> None:
    """As `write_shard`, with the line, and maybe the wait, before the last tensor."""

    def last() -> dict:
        print(path.name.removesuffix(".unfinished"), flush=True)
        if path.name.startswith(f"model-{int(sys.argv[4]):05}-of-"):
            time.sleep(60)
        return steps[-1].make()

    write_shard(path, [*steps[:-1], Step(steps[-1].planned, last)])


if __name__ == "__main__":
    # a shell's background jobs inherit that it is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    writing.write_shard = waiting
    convert(sys.argv[1], sys.argv[2], shard_bytes=int(sys.argv[3]))
    print("written", flush=True)
