"""Checkpoints of a training: periodic saves, and a restore of the newest intact one.

This room imports training, sharding, step and the rooms below. It is loaded on first use.
"""

from fddp.checkpoints.checkpoints import Checkpoints as Checkpoints
