"""Rows: sampling, ranks with unequal numbers of batches, gathering, and metrics over all rows.

This room imports sharding, step, losses, jaxpr, comm and runtime.
"""

from fddp.data.evaluate import evaluate
from fddp.data.sampler import samples
from fddp.data.uneven import gather_rows, join
