"""Which rows a process reads, and ranks that run out of them.

This room imports losses, comm and runtime.
"""

from fddp.data.sampler import samples as samples
from fddp.data.uneven import join as join
