"""Tells MPICH's mpiexec of a job that the watchers end.

mpiexec has a socket for each rank. When one closes, it kills the other ranks of that host, and may take their exit
status for 0. So a rank's watcher holds the socket too. The watcher of rank 0 says last, on its socket, that the job has
failed: then mpiexec ends at once with exit code 1, even if it has lost a host.

Source: MPICH's Hydra, `proxy/pmip_cb.c` and `mpiexec/pmiserv_misc.c`; the wire protocol of PMI 1.
"""

import os
from contextlib import suppress

from .links import Links, ready

ABORT = b"cmd=abort exitcode=1\n"


def leave_last(pmi_fd: int | None, links: Links, seconds: float, *, abort: bool) -> None:
    """Holds mpiexec's socket until mpiexec has ended.

    Args:
      pmi_fd: the socket; None: nothing is to be held.
      links: to the other watchers, which are not to wait for this one.
      seconds: to wait at most.
      abort: whether this watcher ends mpiexec.
    """
    if pmi_fd is None:
        return
    for link in links:
        link.close()
    if abort:
        with suppress(OSError):
            os.write(pmi_fd, ABORT)
    else:
        ready([pmi_fd], seconds)
