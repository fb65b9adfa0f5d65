"""Rows: those that a process reads, ranks that run out of them, and the rows of all ranks together.

This room imports losses, comm and runtime.
"""

from fddp.data.gathered import gather_rows as gather_rows
from fddp.data.sampler import samples as samples
from fddp.data.uneven import join as join
