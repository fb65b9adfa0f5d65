"""Under which schedules a claim about a feature is held.

That every schedule makes of a loss with all features what the fused one makes of it is a claim of
its own, in `test_schedule.py`; so what a feature does is asked under "fused", and under the others
in the slow tier.
"""

import pytest

OTHERS = [pytest.param(schedule, marks=pytest.mark.slow) for schedule in ("staged", "after")]
SCHEDULES = pytest.mark.parametrize("schedule", ["fused", *OTHERS])
