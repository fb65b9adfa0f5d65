"""Sharded states: each replica holds and updates a part of the state, and `whole` joins the parts.

This room imports step and the rooms below it.
"""

from fddp.sharding.shared_state import Sharded
from fddp.sharding.whole import whole
