"""The schedules of a claim about a feature.

`test_schedule.py` claims that "after" gives the results of "overlap" for a loss with all features.
So a feature is tested under "overlap", and under "after" in the slow tier.
"""

import pytest

AFTER = pytest.param("after", marks=pytest.mark.slow)
SCHEDULES = pytest.mark.parametrize("schedule", ["overlap", AFTER])
