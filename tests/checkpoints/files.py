"""Directories for tests: those that other packages made, copies of them that tests change, and what
numpy and ml_dtypes read in them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MADE = Path(__file__).parent / "made"
Tensors = dict[str, Tensor]


def copied(name: str, to: Path) -> Path:
    """A copy of a directory that may be changed."""
    return Path(shutil.copytree(MADE / name, to / name))


def change(directory: Path, how: Callable[[Tensors], Any], file: str = "model.safetensors") -> Path:
    """Changes the tensors of a file."""
    tensors = load_file(directory / file)
    how(tensors)
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, directory / file, {"format": "pt"}
    )
    return directory


def at(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    """Changes one tensor."""
    return lambda tensors: tensors.update({name: how(tensors[name])})


def again(old: str, new: str) -> Callable[[Tensors], None]:
    """Adds tensors a second time, by another name."""
    return lambda t: t.update({n.replace(old, new): t[n].clone() for n in list(t) if old in n})


def change_json(file: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a file of JSON."""
    value = json.loads(file.read_text())
    how(value)
    file.write_text(json.dumps(value))


def raw(directory: Path) -> dict[str, np.ndarray]:
    """All tensors as numpy and ml_dtypes read them, from the description of the format alone."""
    return {
        name: array
        for file in sorted(directory.glob("*.safetensors"))
        for name, array in _read(file.read_bytes()).items()
    }


def _read(data: bytes) -> dict[str, np.ndarray]:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            data[start:][slice(*what["data_offsets"])], DTYPES[what["dtype"]]
        ).reshape(what["shape"])
        for name, what in header.items()
    }


DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def decoded(
    codes: np.ndarray, block_scale: np.ndarray, decode_scale: np.ndarray | float = 1.0
) -> np.ndarray:
    """uint8 [..., N, K/2], scales of blocks [..., N, blocks] and of the matrix -> float32 [..., N,
    K].
    """
    codes = codes.view(np.uint8)
    values = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(*block_scale.shape, -1)
    step = block_scale.astype(np.float32) * np.asarray(decode_scale, np.float32)
    return (values * step[..., None]).reshape(*codes.shape[:-1], -1)


def same(a: Tensor, b: np.ndarray) -> bool:
    """Bit for bit."""
    return torch.equal(a, torch.from_numpy(b.copy(order="C")).to(a.dtype))
