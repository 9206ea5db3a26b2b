"""What a descriptor may say: integers, tables, zero points, levels of scales, rows."""

import pytest
import torch
from bad_calls import messages

from fusion_moe.encodings import ROW, Element, Encoding, Scale, dequantize, quantize
from fusion_moe.layouts import W16X64

U4, I8 = Element.integers("uint4", 4, 0), Element.integers("int8", 8, -128)
TABLE = Element.look_up("table", [0.0, -1.0, 0.25, 1.0])  # in no order: codes are places


def _part_of(largest):
    return lambda amax, outer: torch.where(amax == 0, 1.0, amax / (largest * outer))


def _with_zeros(block):
    scale = Scale("block_scale", torch.float16, block, _part_of(15))
    zero = Scale("zero_point", torch.uint8, block, zero_point=True)
    return Encoding(f"uint4_{block}", U4, (scale, zero))


LEVELS = (
    Scale("block_scale", torch.float16, 32, _part_of(127)),
    Scale("group_scale", torch.bfloat16, 64),
    Scale("row_scale", torch.float32, ROW),
    Scale("matrix_scale", torch.float32, 0),
)
ENCODINGS = [
    *map(_with_zeros, (16, 128, 256, ROW)),
    *(
        Encoding(
            f"{element.name}_zeros",
            element,
            (
                Scale("block_scale", torch.float16, 64, _part_of(255)),
                Scale("zero_point", dtype, 64, zero_point=True),
            ),
        )
        for element, dtype in (
            (Element.integers("uint8", 8, 0), torch.uint8),
            (I8, torch.float16),
        )
    ),
    Encoding("levels", I8, LEVELS),
    Encoding("looked_up", TABLE, (Scale("block_scale", torch.float32, 64),)),
]


def by_formula(q):
    """(code - zero point) * scales, each element by itself."""
    *_, n, k = q.shape
    out, element = torch.empty(n, k), q.encoding.element
    for row in range(n):
        for column in range(k):
            byte = int(q.elements[row, column // element.per_item])
            at = column % element.per_item * element.bits
            value = torch.tensor(element.values[byte >> at & 2**element.bits - 1])
            step = None
            for part, t in list(q.named())[1:]:
                block = part.scale.block
                found = t if block == 0 else t[row, 0 if block == ROW else column // block]
                if part.scale.zero_point:
                    value = value - found.float()
                else:
                    step = found.float() if step is None else step * found.float()
            out[row, column] = value * step
    return out


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
def test_meaning_and_orders(encoding):
    """Quantized, an element is what the formula says and near what it was; tiles keep all bytes."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    x[3, :256] = x[3, :256].abs() + 1  # 0 is in every range
    q = quantize(x, encoding=encoding)
    assert torch.equal(dequantize(q), by_formula(q))
    bound = {"looked_up": 0.6, "levels": 0.02}.get(encoding.name, 0.5)
    assert ((dequantize(q) - x).abs() <= bound * x.abs().amax()).all()
    if encoding.element.bits > 2:
        tiled = W16X64.pack(*q, encoding=encoding)
        assert all(map(torch.equal, W16X64.unpack(*tiled, encoding=encoding), q))
    if encoding.element.bits == 4:
        stored = W16X64.pack(*q, encoding=encoding)
        r, i = 5, 1  # columns 192 .. 255: row 13, first block of the tile
        block = encoding.block_scales[0].block
        each = max(1, 64 // block) if block > 0 else 1
        number = 192 // block if block > 0 else 0
        place = 16 * each * (number // each) + 2 * each * r + i
        assert stored[1].flatten()[place] == q[1][13, number]
    elif encoding.element.bits < 4:
        assert "no order" in W16X64.why_not(16, 256, encoding)


def test_integers_are_known_as_such():
    assert (U4.affine, I8.affine, TABLE.affine) == ((0, 0), (0, -128), None)
    twos = Element.look_up("twos", [0.0, 1.0, -2.0, -1.0])
    assert twos.affine == (2, -2)
    assert Element("half", 16, torch.float16, 65504.0).affine is None


REFUSED = {
    "3 bits": lambda: Element.integers("int3", 3, 0),
    "6 bits": lambda: Element("e2m3", 6, torch.uint8, 7.5),
    "NaN": lambda: Element.look_up("t", [0.0, float("nan")]),
    "5 codes": lambda: Element.look_up("t", [0.0] * 5),
    "order": lambda: Encoding("e", I8, LEVELS[::-1]),
    "nesting": lambda: Encoding("e", I8, (LEVELS[0], Scale("s", torch.float32, 48))),
    "names": lambda: Encoding("e", I8, (LEVELS[0], LEVELS[0])),
    "zero points": lambda: Encoding(
        "e", U4, (LEVELS[1], Scale("z", torch.uint8, 32, zero_point=True))
    ),
    "zero points of signed codes": lambda: Encoding(
        "e", I8, (LEVELS[2], Scale("z", torch.uint8, ROW, zero_point=True))
    ),
    "a dtype that no product reads": lambda: Encoding(
        "e", I8, (LEVELS[2], Scale("z", torch.int8, ROW, zero_point=True))
    ),
    "along N": lambda: Encoding("e", U4, LEVELS[:1], -2),
    "sizes": lambda: quantize(torch.ones(16, 192), encoding=_with_zeros(128)),
}


def test_what_is_no_encoding_is_said(golden):
    golden(messages(REFUSED))


def test_blocks_that_cross_tiles_are_said():
    assert "cross tiles" in W16X64.why_not(16, 192, _with_zeros(48))
