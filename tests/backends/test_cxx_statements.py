"""Statements know what they read: what stands before a loop, and which loops have branches."""

from __future__ import annotations

import pytest

from fusion_moe import FusionDefinition
from fusion_moe.backends.cxx.elements import Elements
from fusion_moe.backends.cxx.indices import Variable
from fusion_moe.backends.cxx.statements import (
    Choice,
    Definition,
    Expression,
    branches,
    hoisted,
    written,
)
from fusion_moe.ir.core import Value

M, J = Variable("m"), Variable("j")


def definition(name: str, *reads: str) -> Definition:
    return Definition("float", name, Expression(" + ".join(reads) or "1", frozenset(reads)))


def elements_of(build, shape=(7, 4), at=(M, J)) -> Elements:
    """What writes an element of the value that `build(fd, x, y)` makes of f32[7, 4] and f32[7,
    1].
    """
    fd = FusionDefinition()
    x, y = (fd.define_tensor(shape=s, dtype="f32") for s in ([7, 4], [7, 1]))
    out: Value = build(fd, x, y)
    fd.add_output(out)
    fusion = fd.fusion()
    made = Elements(fusion, {v: v.name for v in fusion.inputs})
    made.of(fusion.outputs[0], at)
    return made


@pytest.mark.parametrize("gathered", [False, True])
def test_rows_of_codes_are_numbers_where_they_are_read(gathered):
    fd = FusionDefinition()
    codes = fd.define_tensor(shape=[7, 192], dtype="f8e4m3")
    scales = fd.define_tensor(shape=[7, 2], dtype="f32")
    index = fd.define_tensor(shape=[9], dtype="i32")
    parts = [fd.ops.index_select(p, index, dim=0) if gathered else p for p in (codes, scales)]
    rows = fd.ops.pack(*parts, encoding="fp8_rows", layout="linear")
    fd.add_output(rows)
    fusion = fd.fusion()
    made = Elements(fusion, {v: v.name for v in fusion.inputs})
    made.of(fusion.outputs[0], (M, J))
    row, found = ("e0" if gathered else "m"), " ".join(made.lines)
    assert f"e4m3_(i0[(({row} * 192) + j)]) * e" in found
    assert f"i1[(({row} * 2) + (j / 128))]" in found


def test_what_does_not_depend_on_a_variable_stands_before_its_loop():
    """Through other definitions too; a name that has the variable's letter in it is another."""
    first, second, third, constant = (
        definition("a", "m"),
        definition("b", "j"),
        definition("c", "a", "b"),
        definition("e"),
    )
    other, text = definition("d", "jj", "a"), "total += c;"
    assert hoisted([first, second, third, other, constant, text], "j") == (
        [first, other, constant],
        [second, third, text],
    )
    assert hoisted([first, second], "m") == ([second], [first])
    assert hoisted([first, second, constant], "j", "m") == ([constant], [first, second])


def test_what_reads_a_choice_stays_in_the_loop():
    choice = Choice("float", "a", ())
    reader = definition("b", "a")
    assert hoisted([choice, reader], "j") == ([], [choice, reader])
    assert branches([reader, choice])
    assert not branches([reader, "if (x) {"])


def test_a_row_is_loaded_and_computed_once():
    """x * exp(y): y has one column, so its exp does not depend on j."""
    made = elements_of(lambda fd, x, y: fd.ops.mul(x, fd.ops.exp(y)))
    before, inside = hoisted(made.statements, "j")
    assert written(before) == ["const float e1 = widen(i1[m]);", "const float e2 = exp_(e1);"]
    assert written(inside) == [
        "const float e0 = widen(i0[((m * 4) + j)]);",
        "const float e3 = e0 * e2;",
    ]
    assert not branches(made.statements)


def test_an_index_that_is_read_is_a_dependency():
    def picked(fd, x, y):
        index = fd.define_tensor(shape=[5], dtype="i64")
        return fd.ops.index_select(x, index, dim=1)

    index, element, *_ = elements_of(picked).statements
    assert index.value.reads == {"j"}
    assert element.value.reads == {"m", index.name}


def test_what_is_computed_behind_a_condition_is_a_branch():
    def padded(fd, x, y):
        return fd.ops.pad(fd.ops.neg(x), before=[0, 1], after=[0, 2], shape=[7, 7])

    (choice, last) = elements_of(padded).statements
    assert isinstance(choice, Choice)
    (case,) = choice.cases
    assert case.condition.reads == {"m", "j"}
    assert [s.type for s in case.body] == ["float", "float"]
    assert last.value.reads == {choice.name}
    assert choice.lines()[:2] == [f"float {choice.name} = 0;", f"if ({case.condition}) {{"]
