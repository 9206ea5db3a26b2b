"""A kernel repository of Hugging Face's `kernels` package, made of this tree: FOLDER/build/VARIANT.

    python tools/hub_kernel FOLDER      # needs no package

A variant holds the core of fusion_moe, with the CPU kernels that tools/build_kernels.py made, and
what lies in package/ here, which takes the place of files of the core. `kernels` imports it under
its id. So imports are relative, and operations are registered in `torch.ops.<id>`: an installed
fusion_moe, or another version of the kernel, may be in the same process.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "fusion-moe"
# Of the core: layers above those that compute, and what pip and type checkers read.
LEFT_OUT = re.compile(
    r"(checkpoints|cli|frontends|integrations|lora/files|offload|recorder|report)/"
    r"|(api|env|testing)\.py$|.*\.(pyi|typed)$"
)
# `kernels` chooses by the torch that is installed. CUDA: every compute capability from 8.0 on.
VARIANTS = {
    "torch-cpu": {"type": "cpu"},
    "torch-cuda": {"type": "cuda", "archs": ["8.0+PTX"]},
}
# What names the package in its sources. Each occurs.
RENAMED = {
    r"torch\.ops\.fusion_moe\b": "torch.ops.{id}",
    r'"fusion_moe(?=::\w|_python"|\.(?:backends|plugins|translators)")': '"{id}',
    r'(NAMESPACE = |native, )"fusion_moe"': r'\1"{id}"',
    '"native",': '"native{id}",',  # its file: one that is loaded twice is shared
    '"fusion_moe_translators"': '__name__.partition(".")[0] + ".translators"',
}
# What translators, which may lie anywhere, import.
ABSOLUTE = re.compile(rb"^from fusion_moe\.", re.MULTILINE)


def sources() -> dict[str, bytes]:
    """The files of a variant, by their paths in it, before it has an id."""
    core = {n: t for n, t in _below(ROOT / "fusion_moe").items() if not LEFT_OUT.match(n)}
    translators = {
        f"translators/{name}": ABSOLUTE.sub(b"from ..", data)
        for name, data in _below(ROOT / "translators" / "fusion_moe_translators").items()
    }
    found = core | translators | _below(Path(__file__).parent / "package")
    found["__init__.py"] += f'\n__version__ = "{version()}"\n'.encode()
    return found


def _below(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def version() -> str:
    """fusion_moe's. Its first number is the kernel's, where 0 stands for alpha."""
    text = (ROOT / "fusion_moe" / "__init__.py").read_text(encoding="utf-8")
    (number,) = re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)
    return number


def renamed(files: Mapping[str, bytes], identifier: str) -> dict[str, bytes]:
    """The files of the variant with this id."""
    result, counts = dict[str, bytes](), dict.fromkeys(RENAMED, 0)
    for name, data in files.items():
        if name.endswith(".py"):
            text = data.decode()
            for pattern, new in RENAMED.items():
                text, count = re.subn(pattern, new.replace("{id}", identifier), text)
                counts[pattern] += count
            data = text.encode()
        result[name.replace("shipped/native-", f"shipped/native{identifier}-")] = data
    if unused := [pattern for pattern, count in counts.items() if not count]:
        raise SystemExit(f"nothing fits {unused}: RENAMED is older than what it renames")
    return result


def build(folder: Path) -> None:
    """Writes the repository; variants that are there are replaced."""
    files = sources()
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:10]
    shutil.rmtree(folder / "build", ignore_errors=True)
    for variant, backend in VARIANTS.items():
        identifier = f"_{NAME}_{backend['type']}_{digest}".replace("-", "_")
        written = renamed(files, identifier)
        written["metadata.json"] = _metadata(identifier, backend, written)
        for name, data in written.items():
            path = folder / "build" / variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        size, compiled = sum(map(len, written.values())), sum(n.endswith(".so") for n in written)
        print(
            f"{folder}/build/{variant}: {size / 2**20:.1f} MiB, {compiled} compiled libraries for "
            f"CPUs, torch.ops.{identifier}"
        )
    shutil.copy(ROOT / "LICENSE", folder)


def _metadata(identifier: str, backend: object, files: Mapping[str, bytes]) -> bytes:
    """metadata.json, as `kernels` reads it."""
    hashes = {name: hashlib.sha256(data).digest() for name, data in sorted(files.items())}
    metadata = {
        "id": identifier,
        "name": NAME,
        "version": int(version().partition(".")[0]),
        "kernels-minver": "0.17.0",
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(h).decode() for name, h in hashes.items()},
        },
    }
    return json.dumps(metadata, indent=1).encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="hub_kernel", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    build(parser.parse_args().folder)
