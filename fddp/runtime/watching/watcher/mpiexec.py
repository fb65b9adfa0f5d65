"""Reports the failure of a job to MPICH's mpiexec.

mpiexec has a socket for each rank. When a socket closes, mpiexec kills the other ranks of that
host, and may take their exit status for 0. So a rank's watcher holds the socket too. At the end the
watcher of rank 0 reports on its socket that the job has failed. Then mpiexec ends at once with exit
code 1, even if it has lost a host.

Source: MPICH's Hydra, `proxy/pmip_cb.c` and `mpiexec/pmiserv_misc.c`; the wire protocol of PMI 1.
"""

import os
from contextlib import suppress

from .links import Links, wait_readable

ABORT = b"cmd=abort exitcode=1\n"


def leave_last(pmi_fd: int | None, links: Links, seconds: float, *, abort: bool) -> None:
    """Ends mpiexec (`abort`), or holds its socket until it has ended, at most `seconds`.

    The links close first, so that the other watchers do not wait for this watcher.
    """
    if pmi_fd is None:
        return
    for link in links:
        link.close()
    if abort:
        with suppress(OSError):
            os.write(pmi_fd, ABORT)
    else:
        wait_readable([pmi_fd], seconds)
