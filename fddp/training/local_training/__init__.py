"""Local training: replicas train separately, and average their progress every few steps.

This room imports step and the rooms below it.
"""

from fddp.training.local_training.local_steps import LocalState as LocalState
from fddp.training.local_training.local_steps import local_steps as local_steps
