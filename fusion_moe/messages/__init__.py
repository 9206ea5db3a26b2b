"""What a user reads besides errors: progress, warnings, how extras are installed."""

from .extras import install
from .paths import (
    CONFIG,
    GGUF,
    check_checkpoint,
    check_file,
    check_writable,
    destination,
    exists,
    is_gguf,
)
from .progress import MUCH, phase, waiting
from .skipped import check_skip, fits, skipping
from .units import amount, bytes_of, count, duration, ratio, some
from .warn import log, warn_once

__all__ = [
    "CONFIG",
    "GGUF",
    "MUCH",
    "amount",
    "bytes_of",
    "check_checkpoint",
    "check_file",
    "check_skip",
    "check_writable",
    "count",
    "destination",
    "duration",
    "exists",
    "fits",
    "install",
    "is_gguf",
    "log",
    "phase",
    "ratio",
    "skipping",
    "some",
    "waiting",
    "warn_once",
]
