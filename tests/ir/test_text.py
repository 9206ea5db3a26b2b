"""A Fusion as text and back: printed, parsed as data, run by Python."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from bad_calls import messages
from fusions import assert_same_bits, executed, round_trip

from fusion_moe import FusionDefinition
from fusion_moe.errors import ParseError
from fusion_moe.ir.sizes import ceildiv
from fusion_moe.ir.text import one_line, parse, text


def everything():
    """A Fusion with each thing that a text can say."""
    fd = FusionDefinition()
    m = fd.define_size("m")
    g = fd.define_groups("g", 4)
    x = fd.define_tensor(shape=[m / g, 64], dtype="bf16")
    ends = fd.define_tensor(shape=[4], dtype="i32", ends=g)
    state = fd.define_tensor(shape=[m, 64], dtype="f32", role="state")
    padded = fd.define_tensor(shape=[m / g % 128, 4], dtype="f8e4m3", layout="sf128x4")
    odd = fd.define_tensor(
        shape=[(m + 1) / fd.define_groups("h", 2), ceildiv(m, 4)], dtype="f32", role="weight"
    )
    parts = [
        fd.define_tensor(shape=s, dtype=d, role="weight")
        for s, d in (([4, 8, 32], "u8"), ([4, 8, 4], "f8e4m3"), ([4, 2], "f32"))
    ]
    y = fd.ops.grouped_mm(x, fd.ops.pack(*parts, encoding="nvfp4", layout="linear"), ends)
    low = fd.ops.maximum(fd.ops.minimum(y, float("inf")), -7.5)
    wide = fd.ops.cast(x, dtype="f32")
    total = fd.ops.add(fd.ops.reshape(wide, new_shape=(m, 64)), state)
    fd.add_output(low)
    fd.add_output(total)
    fd.add_output(fd.ops.cast(padded, dtype="f32"))
    fd.add_output(fd.ops.sum(odd, dims=(0,), keepdim=True))
    fd.add_output(fd.ops.full(shape=(2 * m + 3,), fill_value=float("-inf"), dtype="f16"))
    return fd.fusion()


def test_everything(golden):
    fusion = everything()
    golden(text(fusion))
    for other in round_trip(fusion):
        assert [other.role(v) for v in other.inputs] == [fusion.role(v) for v in fusion.inputs]
        assert [v.type for v in other.inputs] == [v.type for v in fusion.inputs]


def test_one_line_fits_in_a_comment_and_in_a_string_of_cpp():
    fusion = everything()
    line = one_line(fusion)
    assert not {'"', "\\", "\n"} & set(line)
    assert text(parse(line)) == text(fusion)


def test_names_do_not_show():
    """The text of equal programs is equal, whatever the builder called their values."""

    def build(dead):
        fd = FusionDefinition()
        x = fd.define_tensor(shape=[-1], dtype="f32")
        for _ in range(dead):
            fd.ops.neg(x)
        y = fd.ops.exp(x)
        fd.add_output(y)
        fusion = fd.fusion()
        return type(fusion)(fusion.inputs, fusion.ops[dead:], fusion.outputs, fusion.roles)

    assert text(build(0)) == text(build(3))


GOOD = """def fusion(fd):
    m = fd.define_size('m')
    i0 = fd.define_tensor(shape=[m, 4], dtype="f32")
    t0 = fd.ops.{}
    fd.add_output(t0)"""

NOT_DATA = {
    "import": "import os",
    "two functions": "def fusion(fd):\n    pass\ndef other(fd):\n    pass",
    "another name": GOOD.replace("fusion(fd)", "other(fd)", 1).format("exp(i0)"),
    "a default that is a call": GOOD.replace("fusion(fd)", "fusion(fd, x=print('ran'))", 1).format(
        "exp(i0)"
    ),
    "a decorator": "@print\n" + GOOD.format("exp(i0)"),
    "an import inside": GOOD.format("exp(i0)") + "\n    import os",
    "a call of something else": GOOD.format("exp(i0)") + "\n    print('ran')",
    "a call of something else's method": GOOD.format("exp(i0)")
    + "\n    __import__('os').system('echo ran')",
    "attribute access": GOOD.format("exp(i0)").replace("[m, 4]", "[m.terms, 4]"),
    "a private attribute of fd": GOOD.format("exp(i0)") + "\n    fd._new_name('x')",
    "a method of the operations that is none of them": GOOD.format("__init__(i0)"),
    "another private method": GOOD.format("__setattr__('_fd', i0)"),
    "a method of fd that the text never calls": GOOD.format("exp(i0)")
    + "\n    fd.inline(i0, [], [])",
    "an argument that calls": GOOD.format("exp(print('ran'))"),
    "an argument that is a comprehension": GOOD.format(
        "sum(i0, dims=[print('ran') for i in [1]], keepdim=True)"
    ),
    "a lambda": GOOD.format("exp((lambda: i0)())"),
    "a subscript": GOOD.format("exp([i0][0])"),
    "an f-string": GOOD.format("cast(i0, dtype=f'{i0}')"),
    "a long string": GOOD.format("cast(i0, dtype='a' * 1000000000)"),
    "a power": GOOD.format("add(i0, 10 ** 10)"),
    "starred": GOOD.format("exp(*[i0])"),
    "an unknown name": GOOD.format("exp(i1)"),
    "an unknown operation": GOOD.format("explode(i0)"),
    "an assignment to an attribute": GOOD.format("exp(i0)") + "\n    fd.ops = fd.ops.exp(t0)",
    "two targets": GOOD.format("exp(i0)").replace("t0 =", "t0 = t1 ="),
    "too many results": GOOD.format("exp(i0)").replace("t0 =", "t0, t1 ="),
    "a return": GOOD.format("exp(i0)") + "\n    return t0",
    "a loop": "def fusion(fd):\n    for i in [1]:\n        fd.add_output(i)",
    "a type error": GOOD.format("pack(i0)"),
    "a size of text": GOOD.format("exp(i0)").replace("[m, 4]", "[m / 4, 4]"),
    "a missing argument": GOOD.format("exp(i0)").replace('dtype="f32"', ""),
    "not python": "def fusion(fd:",
    "null bytes": "def fusion(fd):\0",
    "nothing": "",
    "an output that is no value": GOOD.format("exp(i0)").replace("add_output(t0)", "add_output(1)"),
    "one partition twice": "def fusion(fd):\n    g = fd.define_groups('g', 2)\n    i0 = "
    "fd.define_tensor(shape=[2], dtype='i32')\n"
    "    t0 = fd.ops.ends(i0, rows=4, groups=g)\n    t1 = fd.ops.ends(t0, rows=4, groups=g)\n    "
    "fd.add_output(t1)\n"
    "    i1 = fd.define_tensor(shape=[3, 2], dtype='i64')\n    t2, t3, t4 = fd.ops.route(i1, "
    "groups=g)\n    fd.add_output(t2)",
    "an operand too deep": GOOD.format("add(i0, " + "-" * 500 + "1)"),
    "a size too deep": GOOD.format("exp(i0)").replace(
        "[m, 4]", "[" + "+".join(["m"] * 500) + ", 4]"
    ),
    "a polynomial of many terms": GOOD.format("exp(i0)").replace(
        "[m, 4]", "[" + "*".join(["(m + 1)"] * 300) + ", 4]"
    ),
    "a polynomial of many symbols": "def fusion(fd):\n"
    + "".join(f"    s{i} = fd.define_size('s{i}')\n" for i in range(24))
    + f"    i0 = fd.define_tensor(shape=[{'*'.join(f'(s{i} + 1)' for i in range(24))}], "
    "dtype='f32')\n    fd.add_output(i0)",
    "an operand of 84 bits": GOOD.format("add(i0, 10000000000000000000000000)"),
    "a size of 84 bits": GOOD.format("exp(i0)").replace(
        "[m, 4]", "[10000000000000000000000000, 4]"
    ),
    "a negative size": GOOD.format("exp(i0)").replace("[m, 4]", "[-1 * m - 1, 4]"),
    "too deep": "def fusion(fd):\n    fd.add_output(" + "(" * 5000 + ")" * 5000 + ")",
}


@pytest.mark.parametrize("case", NOT_DATA)
def test_only_printed_text_is_parsed(case, capfd):
    with pytest.raises(ParseError) as caught:
        parse(NOT_DATA[case])
    assert "ran" not in capfd.readouterr().out
    if case not in (
        "import",
        "two functions",
        "another name",
        "a default that is a call",
        "a decorator",
        "not python",
        "null bytes",
        "nothing",
        "an input that is written by another type",
        "one partition twice",
        "an operand too deep",
        "a size too deep",
        "a polynomial of many terms",
        "too deep",
    ):
        assert str(caught.value).startswith("line ")


def test_messages(golden):
    cases = (
        "an import inside",
        "a call of something else",
        "another private method",
        "an unknown name",
        "a type error",
        "a loop",
        "nothing",
    )
    golden(messages({case: partial(parse, NOT_DATA[case]) for case in cases}))


def test_the_good_text_of_these_cases_is_parsed():
    fusion = parse(GOOD.format("exp(i0)"))
    x = torch.randn(3, 4)
    assert_same_bits(fusion.evaluate(x), [x.exp()])
    assert_same_bits(executed(GOOD.format("exp(i0)")).evaluate(x), [x.exp()])


def test_the_same_text_in_another_process(tmp_path):
    """Texts are keys of caches: no hash order, no address, no counter of the process may show."""
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\nimport "
        "test_text\nprint(test_text.text(test_text.everything()))"
    )
    (tmp_path / "script.py").write_text(script)
    path = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.rstrip() == text(everything())
