"""Rows: sampling, ranks with unequal numbers of batches, gathering, and metrics over all rows.

This room imports sharding, step, losses, jaxpr, comm and runtime.
"""

from fddp.data.evaluate import evaluate
from fddp.data.gathered import gather_rows
from fddp.data.sampler import samples
from fddp.data.uneven import join
