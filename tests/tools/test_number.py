"""What is said of the tests before they run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

CONFTEST = Path(__file__).parents[1] / "conftest.py"  # other folders have one of this name


def test_the_number_of_tests_that_is_said(request: pytest.FixtureRequest) -> None:
    """In the base lane, where all are collected."""
    plugins = request.config.pluginmanager.get_plugins()
    said = next(p for p in plugins if getattr(p, "__file__", "") == str(CONFTEST))
    everything = said.every(request.config)
    if not said.all_asked_for(request.config):
        pytest.skip("not all tests are collected")
    if not everything and torch.cuda.is_available():
        pytest.skip("those of tests/gpu are collected too")
    count = said.ABOUT_ALL if everything else said.ABOUT
    assert abs(request.session.testscollected - count) < count / 10
