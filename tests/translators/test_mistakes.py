"""Users' translators at fault: their calls run in eager, all else is fused, explain says why; and
the helper that finds faults in tests.
"""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch
from bad_calls import messages
from moe_models import H, I, O, tokens, weight
from users_operations import library

import fusion_moe
from fusion_moe import Untranslatable, translator
from fusion_moe.definitions import translate
from fusion_moe.errors import ShapeError, TranslatorError
from fusion_moe.frontends.inductor.compile_graph import compile_calls
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.ir.sizes import symbol
from fusion_moe.testing import check_translator

NAME = "bad_translators::twice"
ENDS = torch.tensor([1, 1, 4, 5], dtype=torch.int32)
UP, DOWN = weight(I, H), weight(H, I)


@pytest.fixture
def lib():
    """Defines operations for a test; there is one already, `twice`."""
    with library("bad_translators") as define:
        define("twice", "(Tensor x) -> Tensor", lambda x: x * 2)
        yield define


def between(x):
    """The operation between two products."""
    y = torch.ops.bad_translators.twice(O.nvfp4_grouped_mm(x, *UP, ENDS))
    return O.nvfp4_grouped_mm(y, *DOWN, ENDS)


def compiled(function, *inputs, dynamic=None, **switches):
    """What a function gives when it is compiled, and what was found in its graph."""
    torch._dynamo.reset()
    seen = []

    def backend(model, inputs):
        with_ = fusion_moe.options.current().replace(contract_rounding=False, **switches)
        return compile_calls(FusionPass(with_, found=seen.append), model, inputs)

    with torch.no_grad():
        return torch.compile(function, backend=backend, dynamic=dynamic)(*inputs), seen[0]


def of_another_definition(fd, x):
    return fusion_moe.FusionDefinition().define_like(x.type)


def from_another_definition(fd, x):
    return fd.ops.add(x, of_another_definition(fd, x))


def states_an_output(fd, x):
    fd.add_output(fd.ops.add(x, x))
    return fd.ops.add(x, x)


def of_a_size_nobody_knows(fd, x):
    fd.ops.full(shape=(symbol("zz"),), fill_value=1.0, dtype="f32")
    return fd.ops.add(x, x)


def recurses(fd, x):
    return recurses(fd, x)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


def unprintable(fd, x):
    raise Unprintable


FAULTS = {
    "a value of another definition": (
        of_another_definition,
        "returned a f32[5/g0, 16] of another FusionDefinition",
    ),
    "an operand of another definition": (
        from_another_definition,
        "add: the operand i0, f32[5/g0, 16], of another FusionDefinition",
    ),
    "states an output": (
        states_an_output,
        "fd.add_output in a translator; expected operations on its arguments",
    ),
    "defines an input": (
        lambda fd, x: fd.ops.add(x, fd.define_tensor(shape=[5, I], dtype="f32")),
        "fd.define_tensor in a translator",
    ),
    "defines a size": (lambda fd, x: fd.define_size("n") and x, "fd.define_size in a translator"),
    "a size nobody knows": (
        of_a_size_nobody_knows,
        f"the translator of {NAME} returned operations that do not compile: FusionError: "
        "unknown size zz",
    ),
    "a tensor of torch": (
        lambda fd, x: fd.ops.mul(x, torch.tensor(2.0)),
        "mul: the operand is a tensor of torch, torch.float32 []",
    ),
    "a size": (
        lambda fd, x: fd.ops.mul(x, x.type.shape[0]),
        "mul: the operand 5/g0 is a size, which the call decides",
    ),
    "text": (lambda fd, x: fd.ops.mul(x, "2"), "mul: the operand '2' of type str"),
    "a number of no exact value": (
        lambda fd, x: fd.ops.mul(x, np.longdouble(2)),
        "of type longdouble",
    ),
    "no values": (lambda fd, x: (), "returned nothing; expected f32[5, 16], as its fake returns"),
    "several values": (lambda fd, x: (x, x), "returned f32[5/g0, 16], f32[5/g0, 16]; expected f32"),
    "values of another shape": (
        lambda fd, x: fd.ops.permute(x, dims=(1, 0)),
        "returned f32[16, 5/g0]; expected f32[5, 16]",
    ),
    "a number": (lambda fd, x: 3, "returned a int"),
    "None": (lambda fd, x: None, "returned a NoneType"),
    "equality": (lambda fd, x: x == 0.0, "returned a bool (== is identity; fd.ops.eq compares"),
    "a slip": (
        lambda fd, x: fd.ops.rellu(x),
        "failed: NoOperationError: no operation is called 'rellu'; expected one of dir(fd.ops); "
        "did you mean 'relu'?",
    ),
    "torch": (
        lambda fd, x: torch.relu(x),
        "torch's relu of t4, f32[5/g0, 16]; expected fd.ops.relu",
    ),
    "other parameters than the schema's": (
        lambda fd, x, y: x,
        "expected the parameters fd, then the schema's with its defaults: bad_translators::twice(",
    ),
    "a TypeError of its own": (
        lambda fd, x: len(x),
        "expected values, or Untranslatable(reason) for a call that it does not support",
    ),
    "a bare KeyError": (lambda fd, x: {}["a"], "failed: KeyError: 'a'"),
    "no end": (recurses, "failed: RecursionError: "),
    "an error without text": (unprintable, "failed: Unprintable; "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_its_call_is_not_fused_and_all_else_is(lib, name):
    function, why = FAULTS[name]
    translator(NAME)(function)
    x = tokens(5)
    got, found = compiled(between, x)
    assert got.equal(between(x))
    assert len(found.regions) == 2
    (left,) = found.not_fused
    assert left.broken
    assert why in left.why
    assert left.why.startswith("test_mistakes.py:")
    assert left.why.count("; expected ") <= 1


def test_explain_says_the_same(lib):
    translator(NAME)(of_a_size_nobody_knows)
    (left,) = compiled(between, tokens(5))[1].not_fused
    with torch.no_grad():
        report = fusion_moe.explain(between, tokens(5))
    assert [(x.op, x.why) for x in report.not_fused] == [
        ("bad_translators.twice.default", left.why)
    ]
    assert len(report.fusions) == 2
    assert "2 fusions for cpu, 1 translator failed, 100% of flops fused" in repr(report)


def test_the_one_of_two_that_is_at_fault_is_blamed(lib):
    """what is wrong shows when both are compiled, and not when they are translated"""
    thrice = lib("thrice", "(Tensor x) -> Tensor", lambda x: x * 3, torch.empty_like)
    translator(NAME)(of_a_size_nobody_knows)
    translator(thrice)(lambda fd, x: fd.ops.mul(x, 3.0))
    for first, second in (
        (thrice, torch.ops.bad_translators.twice),
        (torch.ops.bad_translators.twice, thrice),
    ):
        _, found = compiled(
            lambda x, a=first, b=second: b(a(O.nvfp4_grouped_mm(x, *UP, ENDS))), tokens(5)
        )
        assert [left.op for left in found.not_fused if left.broken] == [
            "bad_translators.twice.default"
        ]


@pytest.mark.parametrize(
    "two",
    [np.float32(2), np.float16(2), np.float64(2), np.int64(2)],
    ids=lambda two: type(two).__name__,
)
def test_numbers_of_numpy_are_numbers(lib, two):
    # "f32" by position, as nvFuser's attributes may stand
    translator(NAME)(lambda fd, x: fd.ops.mul(fd.ops.cast(x, "f32"), two))
    got, found = compiled(between, tokens(5))
    assert got.equal(between(tokens(5)))
    assert found.not_fused == []


def test_another_meaning_is_told_by_check(lib):
    translator(NAME)(lambda fd, x: fd.ops.mul(x, 2.1))
    x = tokens(5)
    assert not compiled(between, x)[0].equal(between(x))
    got, found = compiled(between, x, check=True)
    assert got.equal(between(x))
    (left,) = found.not_fused
    assert (
        f"the translator of {NAME}, in plain torch, differs from the operation in output 0: "
        "Tensor-likes are not close"
    ) in left.why
    with torch.no_grad(), fusion_moe.options.override(check=True):
        assert [x.why for x in fusion_moe.explain(between, x).not_fused] == [left.why]


def test_the_right_meaning_passes_check(lib):
    translator(NAME)(lambda fd, x: fd.ops.add(x, x))
    got, found = compiled(between, tokens(5), check=True)
    assert got.equal(between(tokens(5)))
    assert found.not_fused == []


def test_check_knows_the_sizes_of_a_call_that_are_symbols(lib):
    translator(NAME)(lambda fd, x: fd.ops.mul(x, 2.1))
    _, found = compiled(
        lambda x: torch.ops.bad_translators.twice(O.nvfp4_grouped_mm(x, *UP, ENDS)),
        tokens(5),
        dynamic=True,
        check=True,
    )
    (left,) = found.not_fused
    assert "differs from the operation in output 0" in left.why


@pytest.mark.parametrize("relates", [False, True])
def test_a_fake_may_have_to_relate_sizes(lib, relates):
    """In a graph two tensors have sizes of their own, equal or not."""

    def fake(x, y):
        if relates:
            torch._check(x.shape[0] == y.shape[0])
        return torch.empty_like(x)

    plus = lib("plus", "(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y, fake)
    translator(plus)(lambda fd, x, y: fd.ops.add(x, y))
    x, y = tokens(5), torch.ones(5, I)
    for t in (x, y):
        torch._dynamo.maybe_mark_dynamic(t, 0)
    got, found = compiled(lambda x, y: plus(O.nvfp4_grouped_mm(x, *UP, ENDS), y), x, y)
    assert got.equal(O.nvfp4_grouped_mm(tokens(5), *UP, ENDS) + 1)
    if relates:
        assert found.not_fused == []
    else:
        (left,) = found.not_fused
        assert left.broken
        assert re.fullmatch(
            r"test_mistakes.py:\d+: sizes s\d+ and s\d+ of bad_translators::plus are not known to "
            r"be equal; expected dimensions that the "
            r"trace relates; relate them in the operation's fake: torch._check\(a.shape\[i\] == "
            r"b.shape\[j\]\)",
            left.why,
        )


# -------------------------------------------------------------------------------------------- names


def test_operations_themselves_are_names(lib):
    packet = torch.ops.bad_translators.twice
    for op in (packet, packet.default, NAME):
        translator(op)(lambda fd, x: fd.ops.add(x, x))
        assert translate.find(NAME) is not None
        translate.unregister(op)
        assert translate.find(NAME) is None


def test_what_is_no_operation_and_no_translator(lib, golden):
    golden(
        messages(
            {
                "several overloads": lambda: translator(torch.ops.aten.add)(lambda fd, x: x),
                "a function": lambda: translator(len)(lambda fd, x: x),
                "None": lambda: translator(NAME)(None),
                "no translator": lambda: check_translator(NAME, torch.ones(3)),
                "no operation": lambda: check_translator("bad_translators::none", torch.ones(3)),
            }
        )
    )


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("aten::sigmiod", "did you mean 'aten::sigmoid'?"),
        ("aten::qqqqqqqqq", "import what registers it"),
        ("aten::atan2.oot", "did you mean 'aten::atan2.out'?"),
        ("bad_translators::twcie", "did you mean 'bad_translators::twice'?"),
        ("no_such_library::anything", "import what registers it"),
        ("aten::sub_", "did you mean 'aten::sub_.Scalar'"),
    ],
)
def test_a_misspelt_name_is_a_warning_once(lib, name, todo, caplog):
    translator(name)(lambda fd, x: x)
    try:
        with caplog.at_level(logging.WARNING, "fusion_moe"):
            for _ in range(2):
                compiled(lambda x: x + 1, tokens(5))
    finally:
        translate.unregister(name)
    (warned,) = [r.getMessage() for r in caplog.records if name in r.getMessage()]
    assert warned.startswith("test_mistakes.py:")
    assert f"there is no operation {name}; expected one that is registered; {todo}" in warned


def test_an_operation_may_come_after_its_translator(lib, caplog):
    translator("bad_translators::late")(lambda fd, x: fd.ops.add(x, x))
    late = lib("late", "(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        _, found = compiled(lambda x: late(O.nvfp4_grouped_mm(x, *UP, ENDS)), tokens(5))
    assert "late" not in caplog.text
    assert found.not_fused == []


def test_an_operation_has_one_translator(lib):
    translator(NAME)(lambda fd, x: fd.ops.add(x, x))
    for name, place in (NAME, r"test_mistakes.py:\d+"), ("aten::exp", r"pointwise.py:\d+"):
        with pytest.raises(TranslatorError, match=f"{name} already has a translator, at {place}"):
            translator(name)(lambda fd, x: x)


# ----------------------------------------------------------------------------------------- mutation


def test_an_operation_that_writes_into_its_arguments_is_told(lib):
    double = lib("double_", "(Tensor(a!) x) -> ()", lambda x: (x.mul_(2), None)[1], lambda x: None)
    both = lib(
        "both",
        "(Tensor x, Tensor(a!) y) -> Tensor",
        lambda x, y: y.add_(x) * 2,
        lambda x, y: torch.empty_like(x),
    )
    translator(both)(lambda fd, x, y: fd.ops.add(x, y))

    def f(x):
        y = O.nvfp4_grouped_mm(x, *UP, ENDS)
        double(y)
        return O.nvfp4_grouped_mm(both(y.cumsum(0), y), *DOWN, ENDS)

    x = tokens(5)
    got, found = compiled(f, x)
    assert got.equal(f(x))
    with torch.no_grad():
        report = fusion_moe.explain(f, x)
    for left in (found.not_fused, report.not_fused):
        why = {x.op: x.why for x in left}
        for op in ("bad_translators.double_.default", "bad_translators.both.default"):
            assert why[op] == "it mutates its arguments, and a fusion only returns new tensors"
    assert report.custom_ops == ("bad_translators::double_",)


# --------------------------------------------------------------------------------- check_translator


def test_a_right_translator_passes(lib):
    translator(NAME)(lambda fd, x: fd.ops.add(x, x))
    for x in (torch.randn(3, 16), torch.randn(2, 3, 16).bfloat16(), torch.arange(4)):
        check_translator(NAME, x)
    check_translator(torch.ops.aten.relu, torch.randn(4, 16))
    check_translator(torch.ops.aten.index_select, torch.randn(4, 16), 0, torch.tensor([3, 0, 3]))
    check_translator(torch.ops.aten.clamp, torch.randn(4, 16), max=0.5)


def test_a_right_translator_of_several_tensors_passes(lib):
    """Each has as many rows as the result of the product."""
    total = lib(
        "total",
        "(Tensor x, Tensor[] others) -> Tensor",
        lambda x, ys: x + sum(ys),
        lambda x, ys: torch.empty_like(x),
    )
    translator(total)(lambda fd, x, ys: fd.ops.add(x, ys[0]))
    check_translator(total, torch.randn(4, 16), [torch.randn(4, 16)])


def only_five_rows(fd, x):
    return fd.ops.mul(x, 2.0 if x.type.shape[0] == 5 else 3.0)


def not_of_groups(fd, x):
    return fd.ops.add(x, x) if isinstance(x.type.shape[0], int) else fd.ops.cast(x, "bf16")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda fd, x: fd.ops.mul(x, 1.01),
            "in plain torch, differs from the operation in output "
            "0: .*; expected the operation's values",
        ),
        (
            lambda fd, x: fd.ops.cast(x, "bf16"),
            r"returned bf16\[5, 16\]; expected f32\[5, 16\], "
            r"as its fake returns",
        ),
        # and not on what is given
        (lambda fd, x: fd.ops.mul(fd.ops.maximum(x, 0.0), 2.0), "differs from the operation"),
        (only_five_rows, "differs from the operation"),
        (not_of_groups, r"returned bf16\[\w+/g0, 16\]"),
    ],
    ids=["values", "dtype", "drawn values", "other sizes", "fused"],
)
def test_a_wrong_translator_does_not_pass(lib, function, said):
    translator(NAME)(function)
    with pytest.raises(
        TranslatorError, match=f"^test_mistakes.py:.*the translator of {NAME}.*{said}"
    ):
        check_translator(torch.ops.bad_translators.twice, torch.ones(5, 16))


def test_what_a_translator_raised_is_the_cause(lib):
    translator(NAME)(lambda fd, x: 1 / 0)
    with pytest.raises(TranslatorError, match="failed: ZeroDivisionError") as caught:
        check_translator(NAME, torch.ones(3))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_refusal_is_told(lib):
    @translator(NAME)
    def refuse(fd, x):
        raise Untranslatable("never")

    with pytest.raises(Untranslatable, match="never"):
        check_translator(NAME, torch.ones(3))


def test_a_fake_that_lies_does_not_pass(lib):
    lies = lib("lies", "(Tensor x) -> Tensor", lambda x: x + 1, lambda x: x.new_empty(2))
    translator(lies)(lambda fd, x: fd.ops.add(x, 1.0))
    said = (
        r"returns torch.float32 \[3\]; expected torch.float32 \[2\], as its fake returns; fix "
        r"the fake"
    )
    with pytest.raises(TranslatorError, match=said):
        check_translator(lies, torch.ones(3))


# Built-in translators -----------------------------------------------------------------------------


def test_what_a_type_rule_refuses_is_a_refusal_of_a_built_in_translator():
    """a user's own is told to be at fault"""
    fd = fusion_moe.FusionDefinition()
    rows = fd.define_tensor(shape=[4, 16], dtype="f32")
    with pytest.raises(Untranslatable, match="as many elements") as refused:
        translate.find("aten::view")(fd, (rows, (5, 16)), {}, [rows.type])
    assert isinstance(refused.value.__cause__, ShapeError)


@pytest.mark.parametrize("interleave", [0, 8])
def test_swiglu_of_columns_that_are_rows_of_groups(interleave):
    """transposed rows in the order of a routing: fused with what gathers them, no translator at
    fault
    """
    ids, offs = torch.randint(0, 4, (16, 1)), torch.tensor([4, 8, 12, 16], dtype=torch.int32)

    def function(x):
        a = x.index_select(0, O.route(ids, 4)[1])
        return O.scaled_swiglu(a.t(), None, interleave), O.nvfp4_grouped_mm(a, *UP, offs)

    x = torch.randn(16, H)
    got, found = compiled(function, x, target="reference")
    for a, b in zip(got, function(x), strict=True):
        torch.testing.assert_close(a, b)
    assert not any(left.broken or "swiglu" in left.op for left in found.not_fused)
