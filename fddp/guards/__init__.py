"""Watches over values: replicas that are no longer equal, and gradients that are not finite.

This room imports step, buckets and comm.
"""

from fddp.guards.digests import comparing as comparing
from fddp.guards.skips import Skips as Skips
