"""The command line `fusion-moe`, also as `python -m fusion_moe.cli`. A file for each command;
output.py prints what one returns.

Exit codes: 0 fine, 1 problems, 2 usage, 3 unsupported, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import signal
import sys

from ..messages.extras import install

__all__ = ["main"]

_NEEDS = ("typer", "rich", "safetensors")


def main() -> None:
    """Runs the command that the process was called with."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in _NEEDS:
            raise
        print(f"fusion-moe: {error.name} is not installed; {install('cli')}", file=sys.stderr)
        sys.exit(3)
    try:
        app(prog_name="fusion-moe")
    finally:  # Ctrl-C once more ends what threads still do, without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
