"""Replicas that train alone, and synchronize a fragment of their parameters now and then.

The optimizers of such a step are in optim. This room imports step and what step imports.
"""

from fddp.local_training.local_runner import alone as alone
