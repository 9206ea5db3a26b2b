"""What is said of the tests before they run."""

from __future__ import annotations

import pytest
from conftest import ABOUT, all_asked_for


def test_the_number_of_tests_that_is_said(request: pytest.FixtureRequest) -> None:
    """In the base lane, where all are collected."""
    if not all_asked_for(request.config):
        pytest.skip("not all tests are collected")
    assert abs(request.session.testscollected - ABOUT) < ABOUT / 10
