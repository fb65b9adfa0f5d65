"""Training with the same bits on any number of replicas: each stands for several virtual ones.

The order of their sums is `comm`'s tree. This room imports step and what step imports.
"""

from fddp.training.reproducible.virtual_replicas import virtual as virtual
