"""Shares a host's cores among its ranks, since MPICH binds none of them.

Unbound ranks take turns on all cores: the threads of XLA of one rank run where another one waits in
MPI. On two cores, a step of two ranks took 1.1 to 1.7 times as long as with a core each. Over Gloo,
whose ranks sleep while they wait, binding changes nothing.
"""

import os


def cores_for(ranks: int) -> int:
    """The cores of each of a host's ranks; 0 if they are too few, or if not all may be used."""
    cores = os.cpu_count() or 1
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return cores // ranks if len(usable) == cores else 0
