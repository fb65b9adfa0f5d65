"""The rows of a process: sampling, ranks with unequal numbers of batches, and gathering.

This room imports losses, comm and runtime.
"""

from fddp.data.gathered import gather_rows as gather_rows
from fddp.data.sampler import samples as samples
from fddp.data.uneven import join as join
