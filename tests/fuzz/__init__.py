"""Random graphs around our operations, run in several ways that must agree; texts, files and state
dicts changed at random. HYPOTHESIS_PROFILE=long makes many more of them.
"""

from __future__ import annotations

import cover
from hypothesis import HealthCheck, settings, strategies as st

# hypothesis draws these numbers, so that it makes what fails smaller
NUMBERS = st.randoms(use_true_random=False)


def examples(times: float) -> settings:
    """So many times as many examples as the profile has."""
    return settings(cover.examples(times), suppress_health_check=list(HealthCheck))
