"""Users' translators at fault, under thunder.jit: the bits of eager, a warning, and what is said of
why their calls are not fused.
"""

from __future__ import annotations

import logging
import re
from importlib.metadata import EntryPoint

import pytest
import torch
from moe_models import H, I, O, tokens, weight

import fusion_moe
from fusion_moe import plugins, translator
from fusion_moe.definitions import translate
from fusion_moe.errors import TranslatorError
from fusion_moe.frontends.regions import Found
from fusion_moe.thunder import thunder_executors

pytestmark = pytest.mark.thunder

NAME = "bad_thunder::twice"
ENDS = torch.tensor([1, 1, 4, 5], dtype=torch.int32)


@pytest.fixture
def twice():
    """A user's operation without a translator."""
    with torch.library._scoped_library("bad_thunder", "DEF") as lib:
        lib.define("twice(Tensor x) -> Tensor")
        lib.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake(NAME, torch.empty_like, lib=lib)
        yield torch.ops.bad_thunder.twice
    translate.unregister(NAME)


def check(f) -> Found:
    """What is found in f; under thunder.jit it gives the bits of eager."""
    import thunder

    from fusion_moe.thunder import found_in

    x = tokens(5)
    with torch.no_grad(), fusion_moe.options.override(contract_rounding=False):
        assert thunder.jit(f, executors=thunder_executors())(x).equal(f(x))
        (found,) = found_in(f, x)
    return found


def product():
    """A product and nothing else."""
    up = weight(I, H)
    return lambda x: O.nvfp4_grouped_mm(x, *up, ENDS)


def why_left(twice) -> str:
    """What is said of the operation between two products, of which each is a fusion then."""
    up, down = weight(I, H), weight(H, I)
    found = check(
        lambda x: O.nvfp4_grouped_mm(twice(O.nvfp4_grouped_mm(x, *up, ENDS)), *down, ENDS)
    )
    assert len(found.regions) == 2
    (why,) = {left.why for left in found.not_fused if left.op == "bad_thunder.twice.default"}
    return why


def raises(fd, x):
    y = fd.ops.add(x, x)
    return y.no_such_thing


RAISES_AT = f"test_bad_translators.py:{raises.__code__.co_firstlineno + 2}"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            raises,
            f"{RAISES_AT}: the translator of {NAME} failed: AttributeError: 'Value' object "
            "has no attribute 'no_such_thing'; "
            "expected values, or Untranslatable; fix the translator; raise "
            "Untranslatable(reason) for calls that it does not support",
        ),
        (
            lambda fd, x: fd.ops.add(x, fd.ops.cast(x, dtype="f64")),
            f"the translator of {NAME} failed: DtypeError: ",
        ),
        (
            lambda fd, x: fd.ops.cast(x, dtype="f64"),
            "returned f64[5/g0, 16]; expected f32[5, 16], as its fake returns; return values of",
        ),
        (
            lambda fd, x: fd.ops.reshape(x, new_shape=(80,)),
            "returned f32[80]; expected f32[5, 16], as its fake returns",
        ),
        (
            lambda fd, x: (x, x),
            "returned f32[5/g0, 16], f32[5/g0, 16]; expected f32[5, 16], as its fake returns",
        ),
        (lambda fd, x: "x", "returned a str; expected f32[5, 16], as its fake returns"),
        (lambda fd: None, "failed: TypeError: "),
    ],
    ids=["raises", "an operation refuses", "dtype", "shape", "count", "no value", "arguments"],
)
def test_its_call_stays_and_the_message_says_where_what_and_what_to_do(
    twice, function, why, caplog
):
    translator(NAME)(function)
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        said = why_left(twice)
    assert why in said
    assert re.match(
        rf"test_bad_translators\.py:\d+: the translator of {NAME} .*; .*(fix the "
        r"translator|return values of these)",
        said,
    )
    assert said in caplog.records[-1].getMessage()


def test_the_second_of_two_is_an_error_and_the_first_is_used(twice):
    @translator(NAME)
    def first(fd, x):
        raise fusion_moe.Untranslatable("the first was asked")

    with pytest.raises(
        TranslatorError,
        match=r"test_bad_translators.py:\d+: bad_thunder::twice "
        r"already has a translator, at test_bad_",
    ):
        translator(f"{NAME}.default")(lambda fd, x: fd.ops.mul(x, 2.0))
    assert why_left(twice) == "refused: the first was asked"


def test_an_entry_point_that_fails_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "bad_thunder_translators.py").write_text(
        "import fusion_moe\nimport no_such_module\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("bad", "bad_thunder_translators", translate.ENTRY_POINTS)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    monkeypatch.setattr(translate, "_failed", [])
    translate._load.cache_clear()
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        check(product())
    (record,) = caplog.records
    assert record.getMessage() == (
        "bad_thunder_translators.py:2: the entry point bad = bad_thunder_translators of ? failed: "
        "ModuleNotFoundError: No module named "
        "'no_such_module'; expected a module of the group fusion_moe.translators that imports; "
        "fix or uninstall that package"
    )


def test_translators_of_operations_that_do_not_exist(twice):
    """there may be none yet, or no such overload"""
    names = ("bad_thunder::no_such_op", "no_such_library::op", f"{NAME}.no_such_overload")
    for name in names:
        translator(name)(lambda fd, x: x)
    try:
        check(product())
    finally:
        for name in names:
            translate.unregister(name)
