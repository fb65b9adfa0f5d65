"""The schedules of a claim about a feature.

`step/test_cases.py` claims that each feature trains under "after". So a feature's own file tests it
under "overlap", and under "after" in the slow tier.
"""

import pytest

AFTER = pytest.param("after", marks=pytest.mark.slow)
SCHEDULES = pytest.mark.parametrize("schedule", ["overlap", AFTER])
