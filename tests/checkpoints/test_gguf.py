"""GGUF files, written and decoded by the package gguf."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_calls import message

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf
from files import MADE
from gguf_files import ARCHITECTURES, rounded_model, write_gguf

from fusion_moe.checkpoints import Directory, check_scales, convert, quantize, weights_in
from fusion_moe.checkpoints.conversion import Source
from fusion_moe.checkpoints.gguf_models import model_of
from fusion_moe.encodings import MXFP4, NVFP4
from fusion_moe.encodings.convert import quantize_weight
from fusion_moe.errors import CheckpointError, UnsupportedError
from fusion_moe.layouts.layout import as_bytes
from fusion_moe.transformers import NVFP4Config, from_pretrained

KINDS = ["MXFP4", "NVFP4", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
KINDS += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
PROMPT = torch.arange(3, 12)[None]


def judged(file: Path) -> dict[str, torch.Tensor]:
    """All tensors by gguf's own reader and decoders."""
    return {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
        for t in gguf.GGUFReader(file).tensors
    }


@pytest.mark.judges("gguf")
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_that_of_gguf(kind: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "qwen3_moe", kind, kind)
    want, directory = judged(file), Directory.open(file)
    weights = weights_in(directory)
    check_scales(directory, weights)
    read = {name: weight.floats(directory.read) for name, weight in weights.items()}
    parts = {entry.name for weight in weights.values() for entry in weight.entries.values()}
    for name, entry in directory.tensors.items():
        if name not in parts:
            t = directory.read(name)
            assert (t.dtype, tuple(t.shape)) == (entry.dtype, entry.shape)
            read[name.removesuffix(".weight")] = t.float()
    layer = "model.layers.1"
    for name, theirs in {
        "lm_head": "output",
        "model.embed_tokens": "token_embd",
        f"{layer}.self_attn.q_proj": "blk.1.attn_q",
        f"{layer}.mlp.gate": "blk.1.ffn_gate_inp",
    }.items():
        assert torch.equal(read[name], want[f"{theirs}.weight"])
    for projection in ("gate", "up", "down"):
        for e, matrix in enumerate(want[f"blk.1.ffn_{projection}_exps.weight"]):
            assert torch.equal(read[f"{layer}.mlp.experts.{e}.{projection}_proj"], matrix)
    if kind in ("MXFP4", "NVFP4"):
        encoding = {"MXFP4": MXFP4, "NVFP4": NVFP4}[kind]
        assert {weight.scheme.encoding for weight in weights.values()} == {encoding}
        assert len(weights) == 2 * (4 * 3 + 4) + 1  # embeddings are floats
    else:
        assert not weights


@pytest.mark.judges("gguf")
@pytest.mark.parametrize("family", ARCHITECTURES)
@torch.no_grad()
def test_a_model_computes_what_the_file_means(family: str, tmp_path: Path) -> None:
    """Against the original model, with its weights as gguf rounds them."""
    file = write_gguf(tmp_path / "model.gguf", family, "MXFP4", "Q8_0")
    model, info = from_pretrained(file, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    want = rounded_model(family, "MXFP4", "Q8_0")
    assert type(model) is type(want)
    assert model.model.layers[-1].mlp.experts.encoding is MXFP4
    torch.testing.assert_close(model(PROMPT).logits, want(PROMPT).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_file_that_llama_cpp_wrote() -> None:
    """By its converter, of the directory beside it, with a layer for multi-token prediction: linear
    attention whose heads it turns.
    """
    folder = MADE / "bf16-qwen3_5_moe"
    model, want = (
        from_pretrained(path, dtype=torch.float32) for path in (folder / "model.gguf", folder)
    )
    assert type(model) is type(want)
    state = model.state_dict()
    for name, t in want.state_dict().items():
        rounded = 1e-7 if name.endswith(".A_log") else 0  # the file has its exponential
        torch.testing.assert_close(state.pop(name), t, rtol=0, atol=rounded)
    assert not state
    assert torch.equal(model(PROMPT).logits, want(PROMPT).logits)


@pytest.mark.judges("gguf")
def test_layers_for_further_tokens_are_left_out(tmp_path: Path) -> None:
    """The last layers of a file, whose other tensors have names of their own."""
    whole = Directory.open(write_gguf(tmp_path / "whole.gguf", "glm4_moe"))
    added = {"blk.3.nextn.eh_proj.weight": [[0.0] * 4], "blk.3.attn_norm.weight": [0.0] * 256}
    more = write_gguf(tmp_path / "more.gguf", "glm4_moe", further=1, **added)
    directory = Directory.open(more)
    assert (directory.config, directory.tensors.keys()) == (whole.config, whole.tensors.keys())
    for count in (-1, 4):
        with pytest.raises(CheckpointError, match="nextn_predict_layers is .*; expected fewer"):
            Directory.open(_with_further(more, tmp_path / "changed.gguf", count))


def _with_further(file: Path, to: Path, count: int) -> Path:
    key = b"nextn_predict_layers" + struct.pack("<I", 4)
    there = file.read_bytes().index(key) + len(key)
    data = bytearray(file.read_bytes())
    data[there : there + 4] = struct.pack("<i", count)
    to.write_bytes(data)
    return to


@pytest.mark.judges("gguf")
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "minimax_m2"])
def test_floats_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Its own loader of GGUF, with our configuration: it has none for the experts' size."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "model.gguf", family, "Q4_K", "Q6_K")
    model = from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=model.config, dtype=torch.float32
    ).state_dict()
    assert all(torch.equal(t, theirs.pop(name)) for name, t in model.state_dict().items())
    assert not theirs
    rounded = from_pretrained(tmp_path / "model.gguf", quantization_config=NVFP4Config())
    assert rounded.model.layers[0].mlp.experts.encoding is NVFP4


def test_queries_and_keys_of_llama_are_turned_as_transformers_does_it(tmp_path: Path) -> None:
    processors = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    file = write_gguf(tmp_path / "model.gguf", "mixtral", "MXFP4", "Q4_K")
    directory, want = Directory.open(file), judged(file)
    turn = processors.LlamaTensorProcessor(directory.config).process
    for letter in "qk":
        name = f"blk.0.attn_{letter}.weight"
        theirs = torch.from_numpy(turn(want[name].numpy(), name).weights)
        ours = directory.read(f"model.layers.0.self_attn.{letter}_proj.weight")
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "to", "encoding"),
    [
        ("MXFP4", "compressed-tensors", MXFP4),
        ("MXFP4", "modelopt", NVFP4),
        ("NVFP4", "modelopt", NVFP4),
    ],
)
def test_it_is_written_without_loss(kind: str, to: str, encoding: Any, tmp_path: Path) -> None:
    """And read again as a directory, and as a model."""
    file = write_gguf(tmp_path / "model.gguf", "mixtral", kind, "Q8_0")
    source = Source.open(file)
    written = Source.open(convert(file, tmp_path / "dst", to))
    assert [*written.weights] == [*source.weights]
    for name, weight in source.weights.items():
        again = written.weights[name]
        assert again.scheme.encoding is encoding
        floats = (w.floats(s.directory.read) for w, s in ((again, written), (weight, source)))
        assert torch.equal(*floats)
    model, again = (from_pretrained(p, dtype=torch.float32) for p in (file, tmp_path / "dst"))
    assert again.model.layers[0].mlp.experts.encoding is encoding
    if kind == encoding.name.upper():
        other = again.state_dict()
        assert all(
            torch.equal(as_bytes(t), as_bytes(other[n])) for n, t in model.state_dict().items()
        )
    model.save_pretrained(tmp_path / "saved")
    saved = weights_in(Directory.open(tmp_path / "saved"))
    assert {w.scheme.encoding for w in saved.values()} == {
        w.scheme.encoding for w in source.weights.values()
    }


def test_scales_of_matrices_beside_nvfp4(tmp_path: Path) -> None:
    scales = {
        "blk.0.ffn_up_exps.scale": [1.0, 0.5, 0.3, 2.0**-9],
        "blk.0.attn_v.scale": [0.7],
        "blk.0.attn_v.input_scale": [3.0],
    }
    file = write_gguf(tmp_path / "model.gguf", "qwen3_moe", "NVFP4", "NVFP4", **scales)
    want, directory = judged(file), Directory.open(file)
    weights = weights_in(directory)
    for e in range(4):
        got = weights[f"model.layers.0.mlp.experts.{e}.up_proj"].floats(directory.read)
        numbers = want["blk.0.ffn_up_exps.weight"][e] * want["blk.0.ffn_up_exps.scale"][e]
        torch.testing.assert_close(got, numbers, rtol=1e-6, atol=0)
    got = weights["model.layers.0.self_attn.v_proj"].quantized(directory.read).decode_scale
    assert got.item() == pytest.approx(0.7)
    file = write_gguf(tmp_path / "mxfp4.gguf", "qwen3_moe", **{"blk.0.ffn_up_exps.scale": [0.5]})
    directory = Directory.open(file)  # which has no such scale: floats
    assert not any(".layers.0." in name for name in weights_in(directory))
    got = directory.read("model.layers.0.mlp.experts.3.up_proj.weight")
    assert torch.equal(got, judged(file)["blk.0.ffn_up_exps.weight"][3] * 0.5)
    file = write_gguf(tmp_path / "two.gguf", "qwen3_moe", **{"blk.0.ffn_up_exps.scale": [1.0, 2.0]})
    with pytest.raises(CheckpointError, match="exps.scale: F32 .2.; expected a float32 for each"):
        Directory.open(file)


def test_experts_of_several_types_are_floats(tmp_path: Path) -> None:
    """As llama.cpp mixes them, which are quantized as any others."""
    file = write_gguf(tmp_path / "model.gguf", "gpt_oss", "Q4_K", "Q6_K")
    directory, want = Directory.open(file), judged(file)
    with pytest.raises(
        UnsupportedError,
        match="no quantized weights; .* quantize makes NVFP4 of floats, and of other types of GGUF",
    ):
        convert(file, tmp_path / "dst")
    written = Directory.open(quantize(file, tmp_path / "dst"))
    for projection in ("gate", "up", "down"):
        for e, matrix in enumerate(want[f"blk.0.ffn_{projection}_exps.weight"][:1]):
            weight = weights_in(written)[f"model.layers.0.mlp.experts.{e}.{projection}_proj"]
            assert all(
                torch.equal(as_bytes(a), as_bytes(b))
                for a, b in zip(
                    weight.quantized(written.read),
                    quantize_weight(matrix, NVFP4, scales="mse"),
                    strict=True,
                )
            )
    bias = written.read("model.layers.1.mlp.experts.2.up_proj.bias")
    assert torch.equal(bias, want["blk.1.ffn_up_exps.bias"][2])
    model = from_pretrained(tmp_path / "dst", dtype=torch.float32)
    assert model.model.layers[0].mlp.experts.encoding is NVFP4
    assert directory.tensors["lm_head.weight"].kind == "GGUF Q6_K"


def test_commands_name_the_types_of_ggml(tmp_path: Path) -> None:
    cli = pytest.importorskip("fusion_moe.cli.inspect_directory")
    written = pytest.importorskip("fusion_moe.cli.convert").written
    file = write_gguf(tmp_path / "model.gguf", "qwen3_moe", "MXFP4", "Q8_0")
    found = cli.inspect_directory(file, values=True)
    assert (found.method, found.algorithm, found.problems) == ("gguf", "", ())
    assert found.bytes < file.stat().st_size < found.bytes + 10**4
    assert [(g.format, g.of, g.weights) for g in found.groups] == [
        ("GGUF MXFP4", "experts", 24),
        ("GGUF Q8_0", "all else", 10),
        ("float32", "all else", 11),
    ]
    file = write_gguf(tmp_path / "other.gguf", "qwen3_moe", "Q5_0", "Q8_0")
    assert cli.inspect_directory(file).groups[2].runs == "decoded to floats when it is loaded"
    tokenizer_of = pytest.importorskip("fusion_moe.cli.models").tokenizer_of
    assert tokenizer_of(file)("t3t41").input_ids == [0, 4, 0, 5, 2]
    result = written(file, partial(quantize, file, tmp_path / "dst"), False, against=file)
    assert [e.name for e in result.errors] == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    assert all(0.07 < e.error < 0.09 for e in result.errors)


def test_a_file_in_parts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "qwen3_moe", "MXFP4", "Q8_0", split=9)
    whole = Directory.open(write_gguf(tmp_path / "whole.gguf", "qwen3_moe", "MXFP4", "Q8_0"))
    parts = sorted(tmp_path.glob("model-*"))
    assert len(parts) == 3
    for part in parts[::2]:
        directory = Directory.open(part)
        assert directory.config == whole.config
        assert all(torch.equal(directory.read(n), whole.read(n)) for n in whole.tensors)
        assert directory.tensors.keys() == whole.tensors.keys()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="00002-of-00003.gguf: No such file"):
        Directory.open(parts[0])


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    """Its experts are converted."""
    file = write_gguf(tmp_path / "model.gguf", "qwen3_moe", "MXFP4")
    renamed = file.read_bytes().replace(b"qwen3moe", b"wen33moe")
    (tmp_path / "other.gguf").write_bytes(renamed)
    written = Source.open(convert(tmp_path / "other.gguf", tmp_path / "dst", "compressed-tensors"))
    source = Source.open(file)
    name = "model.layers.1.mlp.experts.3.down_proj"
    floats = (s.weights[name].floats(s.directory.read) for s in (written, source))
    assert torch.equal(*floats)
    assert "blk.1.attn_q.weight" in written.directory.tensors
    with pytest.raises(UnsupportedError, match="architecture 'wen33moe'; expected one of qwen3moe"):
        from_pretrained(tmp_path / "other.gguf")


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    """As newer files of llama.cpp have them: the rows of gate, then those of up."""
    file = write_gguf(tmp_path / "model.gguf", "gpt_oss", "F32")
    want, whole, added = judged(file), Directory.open(file), {}
    for suffix in ("weight", "bias"):
        both = [want[f"blk.1.ffn_{each}_exps.{suffix}"] for each in ("gate", "up")]
        added[f"blk.1.ffn_gate_up_exps.{suffix}"] = torch.cat(both, 1)
    names = [f"blk.1.ffn_{each}_exps.{s}" for each in ("gate", "up") for s in ("weight", "bias")]
    joined = write_gguf(tmp_path / "new.gguf", "gpt_oss", "F32", without=tuple(names), **added)
    directory = Directory.open(joined)
    assert directory.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(directory.read(n), whole.read(n)) for n in whole.tensors)
    twice = write_gguf(tmp_path / "twice.gguf", "gpt_oss", "F32", **added)
    with pytest.raises(CheckpointError, match="ffn_gate_up_exps.weight.* expected one tensor with"):
        Directory.open(twice)


def test_shapes_that_no_model_has(tmp_path: Path) -> None:
    for name, said in (
        ("blk.0.attn_q.weight", "rows of 4 heads"),
        (
            "blk.0.ffn_up_exps.weight",
            "'blk.0.ffn_up_exps.weight' .7.; expected .experts, rows, col",
        ),
        ("blk.0.ffn_gate_up_exps.bias", "'blk.0.ffn_gate_up_exps.bias' .7.; expected .experts"),
    ):
        file = write_gguf(tmp_path / "model.gguf", "mixtral", without=(name,), **{name: [0.0] * 7})
        with pytest.raises(CheckpointError, match=said):
            Directory.open(file)


# Bad input ----------------------------------------------------------------------------------------


def test_truncated_files(tmp_path: Path) -> None:
    """A sentence, wherever a file ends."""
    whole = write_gguf(tmp_path / "whole.gguf", "qwen3_moe", "MXFP4").read_bytes()
    start = gguf.GGUFReader(tmp_path / "whole.gguf").data_offset
    file = tmp_path / "model.gguf"
    for size in (0, 3, 4, 10, 23, *range(24, start, 97), start, len(whole) // 2, len(whole) - 200):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="expected a whole file of GGUF; download it"):
            Directory.open(file)


def test_headers_of_random_bytes(tmp_path: Path) -> None:
    """A sentence, or a directory: no other error, and none that takes long."""
    file = write_gguf(tmp_path / "model.gguf", "qwen3_moe", "MXFP4", "Q8_0")
    whole, start = file.read_bytes(), gguf.GGUFReader(file).data_offset
    numbers = random.Random(0)
    for _ in range(300):
        at = numbers.randrange(start)
        changed = bytes(numbers.choice((0, 1, 255, numbers.randrange(256))) for _ in range(3))
        file.write_bytes(whole[:at] + changed + whole[at + 3 :])
        with suppress(CheckpointError, UnsupportedError):
            Directory.open(file)


def bytes_of(kind: int, offset: int = 0, shape: tuple[int, ...] = (32, 1)) -> bytes:
    """A file with one tensor."""
    name = b"token_embd.weight"
    said = struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 4) + b"none"
    info = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
    info += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + said + info
    return head + bytes(-len(head) % 32 + 256)


def bytes_of_many(*offsets: int, key: bytes = b"general.alignment", value: int = 32) -> bytes:
    """A file with tensors of 128 bytes, and an entry beside the architecture."""
    texts = b"general.architecture" + struct.pack("<IQ", 8, 4) + b"none"
    said = struct.pack("<Q", 20) + texts + struct.pack("<Q", len(key)) + key
    said += struct.pack("<II", 4, value)
    infos = (
        struct.pack("<Q", 5) + b"%05d" % i + struct.pack("<IQIQ", 1, 32, 0, offset)
        for i, offset in enumerate(offsets)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, len(offsets), 2) + said + b"".join(infos)
    return head + bytes(-len(head) % 32 + 512)


def test_tensors_side_by_side_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes_of_many(256, 0, 128))
    assert {*Directory.open(file).tensors} == {"00000", "00001", "00002"}
    file.write_bytes(bytes_of_many(64, value=64))
    assert {*Directory.open(file).tensors} == {"00000"}


def test_nothing_is_written_of_tensors_that_share_bytes(tmp_path: Path) -> None:
    """A thousand names of the same bytes are no thousand tensors."""
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes_of_many(*[0] * 1000))
    for write in (convert, quantize):
        with pytest.raises(CheckpointError, match="'00001' at 0, no multiple of 32 from 128 on"):
            write(file, tmp_path / "dst")
    assert [*tmp_path.iterdir()] == [file]


BAD: dict[str, Callable[[], bytes]] = {
    "tensors over one another": lambda: bytes_of_many(0, 96),
    "offsets between those that are aligned": lambda: bytes_of_many(0, 136),
    "offsets between those of another alignment": lambda: bytes_of_many(32, value=64),
    "an alignment of no power": lambda: bytes_of_many(0, value=12),
    "metadata twice": lambda: bytes_of_many(0, key=b"general.architecture"),
    "an unknown type": lambda: bytes_of(99),
    "a type without a decoder": lambda: bytes_of(15, shape=(256, 1)),
    "rows that are no whole blocks": lambda: bytes_of(39, shape=(33, 1)),
    "data beyond the end": lambda: bytes_of(0, offset=10**6),
    "an absurd shape": lambda: bytes_of(0, shape=(2**40, 2**40)),
    "nine dimensions": lambda: bytes_of(0, shape=(1,) * 9),
    "no dimensions": lambda: bytes_of(0, shape=()),
    "an older version": lambda: bytes_of(0).replace(b"GGUF\3", b"GGUF\1"),
    "the other order of bytes": lambda: bytes_of(0).replace(b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"),
    "another kind of file": lambda: b"PK\3\4" * 100,
    "metadata of an unknown type": lambda: bytes_of(0).replace(
        struct.pack("<IQ", 8, 4), struct.pack("<IQ", 13, 4)
    ),
    "an array without end": lambda: bytes_of(0).replace(
        struct.pack("<IQ", 8, 4), struct.pack("<IIQ", 9, 0, 2**62)
    ),
    "a name that is no text": lambda: bytes_of(0).replace(b"token_embd", b"token\xff\xff\xffbd"),
}


@pytest.mark.parametrize("made", BAD.values(), ids=BAD)
def test_broken_files(
    made: Callable[[], bytes], tmp_path: Path, golden: Callable[..., None]
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(made())
    golden(message(lambda: Directory.open(file)))


def test_what_a_model_of_an_architecture_lacks(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "qwen3_moe")
    for old, new, said in (
        (b"expert_used_count", b"expert_xxxx_count", "qwen3moe.expert_used_count is None"),
        (b"head_count\4\0\0\0\4", b"head_count\4\0\0\0\0", "head_count is 0; expected a whole"),
        (b"head_count\4\0\0\0\4", b"head_count\4\0\0\0\3", "of 256 rows; expected rows of 3 heads"),
        (
            b"head_count\4\0\0\0\4\0",
            b"head_count\6\0\0\0\0\0",
            r"head_count is .*; expected a whole",
        ),
        (b"block_count\4\0\0\0\2\0\0\0", b"block_count\4\0\0\0\2\0\0\x7f", "no blk.2130706433."),
        (
            b"rms_epsilon" + struct.pack("<If", 6, 1e-6),
            b"rms_epsilon" + struct.pack("<If", 6, math.nan),
            "rms_epsilon is nan; expected a number above 0",
        ),
        (
            b"rope.freq_base" + struct.pack("<I", 6),
            b"rope.freq_base" + struct.pack("<I", 4),
            "freq_base is [0-9]+; expected a number above 0",
        ),
        (b"blk.0.attn_q.", b"blk.0.attn_x.", "no blk.0.attn_q.weight"),
        (b"blk.1.attn_q.", b"blk.1.attn_x.", "blk.1.attn_x.weight'; expected tensors of Qwen3Moe"),
        (
            b"blk.1.ffn_up_exps.",
            b"blk.9.ffn_up_exps.",
            "layers.1.mlp.experts: gate_proj, down_proj",
        ),
    ):
        changed = tmp_path / "changed.gguf"
        changed.write_bytes(file.read_bytes().replace(old, new))
        with pytest.raises((CheckpointError, UnsupportedError), match=said):
            Source.open(changed)


def test_linear_attention_of_other_sizes(tmp_path: Path) -> None:
    """Than those of its tensors: their rows would be turned wrongly."""
    whole = MADE.joinpath("bf16-qwen3_5_moe", "model.gguf").read_bytes()
    changed = tmp_path / "changed.gguf"
    for key, value, said in (
        (b"ssm.time_step_rank", 5, "blk.0.*; expected as many rows and columns"),
        (b"ssm.time_step_rank", 1, "blk.0.*; expected as many rows and columns"),
        (b"ssm.state_size", 7, "blk.0.*; expected as many rows and columns"),
        (b"ssm.group_count", 2**30, "blk.0.*; expected as many rows and columns"),
        (b"attention.recurrent_layers", 7, "recurrent_layers is 7; expected one for each of 2"),
    ):
        start = whole.index(key) + len(key)
        kind = whole[start : start + 4]
        old = 4 + 4 if kind == struct.pack("<I", 4) else 4 + 4 + 8 + 3  # a list of three booleans
        new = struct.pack("<II", 4, value)
        changed.write_bytes(whole[:start] + new + whole[start + old :])
        with pytest.raises(CheckpointError, match=said):
            Directory.open(changed)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"type": "su"}, "scaling.type is 'su'; expected none, linear or yarn"),
        ({"type": "linear"}, "scaling.factor is None; expected a number above 0"),
        ({"type": "yarn", "factor": 4.0, "yarn_beta_fast": math.inf}, "beta_fast is inf; expected"),
    ],
    ids=lambda x: x["type"] if isinstance(x, dict) else "",
)
def test_ropes_that_no_model_has(entries: dict[str, Any], said: str) -> None:
    known = {f"qwen3moe.rope.scaling.{key}": value for key, value in entries.items()}
    with pytest.raises((CheckpointError, UnsupportedError), match=said):
        model_of(SAID | known, SHAPES, "file")


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("attention.clamp_kqv", 0.0, 8.0),
        ("attention.causal", True, False),
        ("attention.sliding_window", 1, 4),
        ("expert_gating_func", 1, 2),
        ("expert_weights_scale", 1.0, 2.5),
        ("logit_scale", 1.0, math.nan),
        ("rope.dimension_count", 32, 16),
        ("rope.scaling.attn_factor", 1.0, 2.0),
        ("swiglu_clamp_exp", (0.0, 0.0), (0.0, 7.0)),
    ],
)
def test_entries_that_its_class_does_not_compute(key: str, neutral: Any, other: Any) -> None:
    """A model without them would be another one, and nothing would say so."""
    config = model_of(SAID, SHAPES, "file").config
    assert model_of(SAID | {f"qwen3moe.{key}": neutral}, SHAPES, "file").config == config
    with pytest.raises(UnsupportedError, match=f"{key} is .*; expected .*, as Qwen3MoeForCausalLM"):
        model_of(SAID | {f"qwen3moe.{key}": other}, SHAPES, "file")


@pytest.mark.parametrize(("architecture", "usual"), [("qwen3moe", True), ("olmoe", False)])
def test_weights_of_experts_that_are_normalized(architecture: str, usual: bool) -> None:
    known = {key.replace("qwen3moe.", f"{architecture}."): value for key, value in SAID.items()}
    known |= {"general.architecture": architecture}
    for entries, norm in (
        ({}, usual),
        ({f"{architecture}.expert_weights_norm": True}, True),
        ({f"{architecture}.expert_weights_norm": False}, False),
    ):
        assert model_of(known | entries, SHAPES, "file").config["norm_topk_prob"] is norm


SAID: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    **{
        f"qwen3moe.{key}": 1
        for key in (
            "block_count",
            "embedding_length",
            "attention.head_count",
            "attention.head_count_kv",
            "context_length",
            "expert_count",
            "expert_used_count",
        )
    },
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
}
SHAPES = {
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.ffn_down_exps.weight": (1, 32, 32),
    "token_embd.weight": (32, 32),
}
