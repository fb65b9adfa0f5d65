"""Checks of values: unequal replicas, and non-finite gradients.

This room imports step, buckets and comm.
"""

from fddp.guards.digests import comparing as comparing
from fddp.guards.skips import Skips as Skips
