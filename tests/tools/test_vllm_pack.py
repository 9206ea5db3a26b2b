"""tools/engines_gpu/pack.py: which wheels travel, which machine code, and how pieces join."""

from __future__ import annotations

import importlib.util
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pyarrow")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pack() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pack", ROOT / "tools/engines_gpu/pack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fat(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary: of each entry its kind (1: PTX, 2: ELF), GPU and code."""
    body = b"".join(
        struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28, b"\0")
        + struct.pack("<I", arch).ljust(36, b"\0")
        + code
        for kind, arch, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(section: bytes) -> bytes:
    """A file with this .nv_fatbin, and code of the host before it."""
    names, host = b"\0.nv_fatbin\0.shstrtab\0", b"host code" * 4
    start = 64 + len(host)
    table = start + len(section) + len(names)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 2)
    sections = (0, 0, 0), (1, start, len(section)), (12, start + len(section), len(names))
    rows = [
        struct.pack("<IIQQQQ", name, 0, 0, 0, offset, size).ljust(64, b"\0")
        for name, offset, size in sections
    ]
    return bytes(head) + host + section + names + b"".join(rows)


def test_code_for_other_gpus_is_zeroed(pack: ModuleType) -> None:
    both = fat((2, 80, b"a" * 48), (2, 90, b"b" * 40), (1, 90, b"c" * 24))
    old = fat((2, 80, b"d" * 32), (1, 80, b"e" * 16), (1, 100, b"f" * 16))
    library = elf(both + bytes(8) + old)
    trimmed, kept = pack.trimmed(library, 90)
    assert kept == 40 + 16  # where no code is native: PTX that this GPU can compile
    expected = library
    for code in b"a" * 48, b"c" * 24, b"d" * 32, b"f" * 16:
        expected = expected.replace(code, bytes(len(code)))
    assert trimmed == expected


def test_attention_of_one_kind(pack: ModuleType) -> None:
    """Of FlashAttention 3 what has these heads in bfloat16, and what is for all kinds."""
    tile = "cute5tupleIJNS5_1CILi128EEENS7_ILi160EEENS7_ILi%dEEEEEELi%dENS_%s_tEfNS_4arch"
    codes = {
        kind: f"_ZN5flash25CollectiveMainloopFwdSm90ILi2EN4{tile % kind}".encode()
        for kind in ((128, 128, "10bfloat16"), (64, 64, "10bfloat16"), (128, 128, "6half"))
    }
    codes["combine"] = b"_ZN5flash19FlashAttnFwdCombineIN4cuteENS_10bfloat16_tE"
    kept = [kind for kind, code in codes.items() if pack._attends(128, code)]
    assert kept == [(128, 128, "10bfloat16"), "combine"]


def wheel(folder: Path, name: str, *requires: str, files: tuple[str, ...] = ()) -> None:
    (folder / name).mkdir(parents=True)
    with zipfile.ZipFile(folder / name / f"{name}-1.0-py3-none-any.whl", "w") as members:
        lines = [f"Name: {name}", *(f"Requires-Dist: {text}" for text in requires)]
        members.writestr(
            f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n\nRequires-Dist: no"
        )
        for file in (f"{name}/__init__.py", *files):
            members.writestr(file, name)


def test_what_travels(pack: ModuleType, tmp_path: Path) -> None:
    """Requirements of requirements, and of extras that are asked for later, once each."""
    wheels = tmp_path / "wheels"
    wheel(wheels, "vllm", "a", "b[more]", "torch", 'c; python_version < "3"', "tilelang")
    wheel(wheels, "a", "b", "vllm")
    wheel(wheels, "b", 'd; extra == "more"', 'e; extra == "other"')
    wheel(wheels, "d")
    installed = {"torch"} | pack.ENGINES["vllm"].unneeded
    paths = pack.closure(["vllm==1.0"], wheels, installed, "3.12")
    assert [p.parent.name for p in paths] == ["vllm", "a", "b", "d"]


def test_pieces_join(pack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed").write_text("torch\n")
    wheel(
        tmp_path / "wheels",
        "vllm",
        "torch",
        files=(
            "vllm/tests/test_a.py",
            "vllm/third_party/a.cuh",
            "vllm/other.abi3.so",
            "vllm/data.json",
        ),
    )
    command = ["pack.py", "pack", str(tmp_path), "vllm", "--installed", str(tmp_path / "installed")]
    monkeypatch.setattr("sys.argv", [*command, "--libraries", "_C_stable_libtorch"])
    engine = replace(pack.ENGINES["vllm"], appended={"vllm/data.json": " and more"})
    monkeypatch.setitem(pack.ENGINES, "vllm", engine)
    pack.main()
    (piece,) = (tmp_path / "pieces").iterdir()
    data = piece.read_bytes()
    piece.unlink()
    for i, part in enumerate((data[:100], data[100:])):
        (tmp_path / "pieces" / f"site.{i}of2").write_bytes(part)
    site = tmp_path / "site"
    monkeypatch.setattr("sys.argv", ["pack.py", "unpack", str(tmp_path / "pieces"), str(site)])
    pack.main()
    found = sorted(str(p.relative_to(site)) for p in site.rglob("*") if p.is_file())
    assert [name for name in found if not name.startswith("fusion_moe-")] == [
        "vllm-1.0.dist-info/METADATA",
        "vllm/__init__.py",
        "vllm/data.json",
        "vllm/vllm_flash_attn/_vllm_fa3_C.py",
    ]
    assert (site / "vllm/data.json").read_text() == "vllm and more"
    (plugins,) = site.glob("fusion_moe-*.dist-info/entry_points.txt")
    assert "vllm.general_plugins" in plugins.read_text()
    (tmp_path / "pieces" / "site.1of2").unlink()
    with pytest.raises(SystemExit, match="1 of 2 pieces"):
        pack.main()
