"""An engine and what it needs, in pieces, for a GPU machine without a network.

    python tools/engines_gpu/pack.py pack FOLDER vllm==0.33.0 trl datasets --installed FILE
    python tools/engines_gpu/pack.py unpack FOLDER SITE    # there, with all pieces in FOLDER

`pack` downloads the requirements and theirs, except what the lines of --installed name (packages
of that machine, as `pip list --format freeze`; requirements on the command line are taken in any
case) and what the engine, which the first requirement names, does not need: travels.py says what.
It leaves out machine code for other GPUs than --arch; of FlashAttention 3, which is vLLM's default
on Hopper, it keeps what bfloat16 and heads of --head elements need. This library's entry points
travel too, its files with the tree. FOLDER/pieces then has files of at most --mb MB; each works in
any order, in calls of their own. `unpack` joins them in SITE, for PYTHONPATH; started.py starts an
engine from them alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import itertools
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pyarrow
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

sys.path.append(str(Path(__file__).parent))

from travels import ENGINES, FLASH, Engine

_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)]
_PLATFORMS += [f"manylinux{n}_x86_64" for n in (1, 2010, 2014)]
_ENTRY = struct.Struct("<HHIQ")  # of a fat binary: kind, version, size of header, size
_PTX, _ELF = 1, 2
PIECE_MB = 50


def pack(folder: Path, asked: argparse.Namespace) -> None:
    """Writes folder/pieces, and says what each library and each package takes."""
    installed = {
        canonicalize_name(line.partition("==")[0]) for line in asked.installed.read_text().split()
    }
    engine = ENGINES[canonicalize_name(Requirement(asked.requirements[0]).name)]
    libraries = asked.libraries or engine.libraries
    wanted, wheels = [*asked.requirements, *engine.more], folder / "wheels"
    archive = folder / "site.tar"
    sizes: dict[str, int] = {}
    with tarfile.open(archive, "w") as tar:

        def add(name: str, data: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))

        for wheel in closure(wanted, wheels, installed | engine.unneeded, asked.python):
            with zipfile.ZipFile(wheel) as members:
                for name in sorted(members.namelist()):
                    if name.endswith("/") or not _travels(name, engine, libraries):
                        continue
                    data = members.read(name)
                    if name in engine.older:
                        data = _older(engine.older[name], name, folder / "older", asked.python)
                    if re.fullmatch(engine.own, name):
                        keeps = partial(_attends, asked.head) if FLASH in name else bool
                        data, kept = trimmed(data, asked.arch, keeps)
                        print(f"{name}: {kept / 1e6:.1f} MB of machine code for {asked.arch}")
                    data += engine.appended.get(name, "").encode()
                    add(name, data)
                    sizes[wheel.name] = sizes.get(wheel.name, 0) + len(data)
        for name, text in engine.made.items():
            if Path(name).stem not in libraries:
                add(name, text.encode())
        # of an editable install: what says that there are plug-ins
        ours = importlib.metadata.distribution("fusion_moe")
        for name in "METADATA", "entry_points.txt":
            add(
                f"fusion_moe-{ours.version}.dist-info/{name}", (ours.read_text(name) or "").encode()
            )
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:15]:
        print(f"{size / 1e6:7.1f} MB {name}")
    print(f"{len(sizes)} packages")
    split(archive, folder / "pieces", asked.mb * 10**6)


def _older(requirement: str, name: str, folder: Path, python: str) -> bytes:
    """A file of another version's wheel."""
    (wheel,) = closure([requirement], folder, set(), python, deep=False)
    with zipfile.ZipFile(wheel) as members:
        return members.read(name)


def closure(
    wanted: list[str], folder: Path, installed: set[str], python: str, deep: bool = True
) -> Iterator[Path]:
    """Wheels of requirements, and of theirs if deep, downloaded into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {"python_version": python, "platform_machine": "x86_64"}
    todo, seen = [Requirement(text) for text in wanted], set[tuple[str, str]]()
    wheels: dict[str, Path] = {}
    while todo:
        named = {canonicalize_name(of.name): of for of in reversed(todo)}
        new = [of for name, of in named.items() if not list((folder / name).glob("*.whl"))]
        _download(new, folder, python)
        asked, todo = todo, []
        for requirement in asked:
            name = canonicalize_name(requirement.name)
            if name not in wheels:
                (wheels[name],) = (folder / name).glob("*.whl")
                yield wheels[name]
            for extra in {"", *requirement.extras} - {e for n, e in seen if n == name}:
                seen.add((name, extra))
                for of in map(Requirement, _requires(wheels[name]) if deep else ()):
                    applies = of.marker is None or of.marker.evaluate(where | {"extra": extra})
                    if applies and canonicalize_name(of.name) not in installed:
                        todo.append(of)


def _download(requirements: list[Requirement], folder: Path, python: str) -> None:
    """Puts the wheel of each into folder/name, from the index."""
    if not requirements:
        return
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += itertools.chain(*(("--platform", name) for name in _PLATFORMS))
    subprocess.run([*command, *(f"{of.name}{of.specifier}" for of in requirements)], check=True)
    for wheel in folder.glob("*.whl"):
        place = folder / parse_wheel_filename(wheel.name)[0]
        place.mkdir(exist_ok=True)
        wheel.rename(place / wheel.name)


def _requires(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as members:
        (name,) = (n for n in members.namelist() if re.fullmatch(r"[^/]*\.dist-info/METADATA", n))
        lines = members.read(name).decode().split("\n\n")[0].splitlines()
    start = "Requires-Dist: "
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def _travels(name: str, engine: Engine, libraries: tuple[str, ...]) -> bool:
    if any(fnmatch(name, pattern) for pattern in engine.dropped):
        return False
    return not re.fullmatch(engine.own, name) or Path(name).name.split(".")[0] in libraries


def trimmed(library: bytes, arch: int, keeps: Callable[[bytes], bool] = bool) -> tuple[bytes, int]:
    """An ELF library whose fat binaries have zeros, which compress well, in place of machine code
    for other GPUs than arch (90: compute capability 9.0), or that `keeps` refuses; and the bytes of
    code that it keeps. PTX stays where there is no code for this GPU. Offsets stay, so a loader
    finds all else.
    """
    data, kept = bytearray(library), 0
    for offset, size in _sections(library, (".nv_fatbin", "__nv_relfatbin")):
        position, end = offset, offset + size
        while position < end - 16:
            magic, _, header, length = struct.unpack_from("<IHHQ", library, position)
            if magic != 0xBA55ED50:
                position += 8
                continue
            entries = list(_entries(library, position + header, length))
            native = any(kind == _ELF and of == arch for kind, of, _, _ in entries)
            for kind, of, where, n in entries:
                ptx = kind == _PTX and of <= arch and not native
                wanted = ptx or (kind == _ELF and of == arch)
                if wanted and keeps(library[where : where + n]):
                    kept += n
                else:
                    data[where : where + n] = bytes(n)
            position += header + length
    return bytes(data), kept


def _attends(head: int, code: bytes) -> bool:
    """Whether machine code of FlashAttention 3 is for bfloat16 and heads of this size, or for all
    kinds. The names of kernels say the tile, head size last, the size of values, and the dtype.
    """
    kernel = re.search(rb"MainloopFwdSm90I\w+?EEELi(\d+)ENS_(\w+?)_t", code)
    return kernel is None or (
        kernel.groups() == (str(head).encode(), b"10bfloat16")
        and re.search(rb"ILi(?!%d)\d+EEEEEELi%d" % (head, head), kernel[0]) is None
    )


def _sections(library: bytes, names: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Offset and size of an ELF's sections of these names."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, strings = struct.unpack_from("<HHH", library, 0x3A)
    all_of = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    for section in all_of:
        start = all_of[strings][4] + section[0]
        if library[start : library.index(b"\0", start)].decode() in names:
            yield section[4], section[5]


def _entries(library: bytes, position: int, length: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, GPU, offset and size of what a fat binary holds."""
    end = position + length
    while position < end:
        kind, _, header, size = _ENTRY.unpack_from(library, position)
        (arch,) = struct.unpack_from("<I", library, position + 28)
        yield kind, arch, position + header, size
        position += header + size


def split(archive: Path, folder: Path, size: int) -> None:
    """Writes the archive NAME.tar, compressed, as folder/NAME.0of2, ...; deletes it."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{archive.stem}.*of*"):
        old.unlink()
    codec = pyarrow.Codec("zstd", compression_level=9)
    data = codec.compress(archive.read_bytes(), asbytes=True)
    length = struct.pack("<Q", archive.stat().st_size)
    data, parts = length + data, -(-(len(data) + 8) // size)
    for i in range(parts):
        piece = data[i * len(data) // parts : (i + 1) * len(data) // parts]
        (folder / f"{archive.stem}.{i}of{parts}").write_bytes(piece)
        print(f"{len(piece) / 1e6:7.1f} MB {folder.name}/{archive.stem}.{i}of{parts}")
    archive.unlink()


def unpack(folder: Path, site: Path) -> None:
    """Joins the pieces of folder, and writes their files to site; SystemExit if one is missing."""
    for name in sorted({path.stem for path in folder.glob("*.*of*")}) or ["site"]:
        pieces = sorted(folder.glob(f"{name}.*of*"), key=lambda p: int(p.suffix[1:].split("of")[0]))
        count = int(pieces[0].suffix.partition("of")[2]) if pieces else 1
        if len(pieces) != count:
            raise SystemExit(f"{len(pieces)} of {count} pieces are in {folder}")
        data = b"".join(piece.read_bytes() for piece in pieces)
        (size,) = struct.unpack_from("<Q", data)
        files = pyarrow.Codec("zstd").decompress(memoryview(data)[8:], size)
        with tarfile.open(fileobj=io.BytesIO(memoryview(files))) as tar:
            tar.extractall(site, filter="fully_trusted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    packing, unpacking = commands.add_parser("pack"), commands.add_parser("unpack")
    for command in packing, unpacking:
        command.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path)
    packing.add_argument("requirements", nargs="+")
    packing.add_argument("--installed", type=Path, required=True, help="names, a line each")
    packing.add_argument("--libraries", nargs="+", help="of the engine, in place of its own list")
    packing.add_argument("--python", default="3.12")
    packing.add_argument("--arch", type=int, default=90, help="90: compute capability 9.0")
    packing.add_argument("--head", type=int, default=128, help="elements of an attention head")
    packing.add_argument("--mb", type=int, default=PIECE_MB, help="of a piece")
    asked = parser.parse_args()
    if asked.command == "pack":
        pack(asked.folder, asked)
    else:
        unpack(asked.folder, asked.site)


if __name__ == "__main__":
    main()
