"""Metrics of a state over all rows of all ranks.

This room imports sharding, step, losses, jaxpr, comm and runtime.
"""

from fddp.evaluation.evaluate import evaluate as evaluate
