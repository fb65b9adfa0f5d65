"""Freed memory stays in the process, for the next step.

XLA:CPU allocates the arrays of a program in each call. By default glibc returns large blocks to the
kernel, which maps and clears their pages again: a sixth of the step of a GPT of 36 MiB.
"""

import ctypes
import os
from collections.abc import Mapping

# Parameters of glibc's `mallopt`: no block is mapped by itself (M_MMAP_MAX), the heap does not
# shrink (M_TRIM_THRESHOLD), all threads share it (M_ARENA_MAX), since other heaps end at 64 MiB,
# and small pieces join the blocks between which they lie (M_MXFAST).
KEEPING = {-4: 0, -1: -1, -8: 1, 1: 0}
VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Sets malloc's parameters for later threads; False if there are none, or the user's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith(VARIABLES) for name in environ):
        return False
    for parameter, value in KEEPING.items():
        mallopt(parameter, value)
    return True
