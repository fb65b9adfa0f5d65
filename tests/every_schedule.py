"""The schedules of a claim about a feature.

`test_schedule.py` claims that every schedule gives the results of the fused one for a loss with all
features. So a feature is tested under "fused", and under the others in the slow tier.
"""

import pytest

OTHERS = [pytest.param(schedule, marks=pytest.mark.slow) for schedule in ("staged", "after")]
SCHEDULES = pytest.mark.parametrize("schedule", ["fused", *OTHERS])
