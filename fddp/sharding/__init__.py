"""Replicas that share a state: each holds a part of it and updates that part; and such a state put together again.

This room imports step and what step imports.
"""

from fddp.sharding.shared_state import sharded as sharded
from fddp.sharding.whole import whole as whole
