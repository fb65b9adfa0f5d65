"""A state saved now and then, and the newest whole checkpoint to go on from; loaded when it is used.

This room imports training, sharding, step, buckets and comm.
"""

from fddp.checkpoints.checkpoints import Checkpoints as Checkpoints
