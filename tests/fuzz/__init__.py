"""Random graphs around our operations, run in several ways that must agree; texts, files and state
dicts changed at random. HYPOTHESIS_PROFILE=long makes many more of them.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# hypothesis draws these numbers, so that it makes what fails smaller
NUMBERS = st.randoms(use_true_random=False)


def examples(times: float) -> settings:
    """So many times as many examples as the profile has."""
    count = max(1, round(settings().max_examples * times))
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))
