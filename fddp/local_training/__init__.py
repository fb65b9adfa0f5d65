"""Local training: islands of replicas train separately, and synchronize periodically.

This room imports step and the rooms below it.
"""

from fddp.local_training.local_steps import local_steps as local_steps
