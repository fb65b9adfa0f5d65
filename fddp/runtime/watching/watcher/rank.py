"""The rank of a watcher: its records, its end, and its last messages.

MPICH's mpiexec has a socket for each rank. When a socket closes, mpiexec kills the other ranks of
that host, and may take their exit status for 0. So a rank's watcher holds the socket too. At the
end the watcher of rank 0 reports on its socket that the job has failed. Then mpiexec ends at once
with exit code 1, even if it has lost a host.

Source: the monitor process of NVIDIA's resiliency extension; MPICH's Hydra, `proxy/pmip_cb.c` and
`mpiexec/pmiserv_misc.c`; the wire protocol of PMI 1.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from mmap import mmap
from operator import itemgetter
from pathlib import Path
from typing import Any

from .links import EVERY_S, Links, wait_readable
from .shared_memory import EXITED, FAILED, FINISHED, LEFT, MESSAGES, REPORT, SIZE, VERDICT, message

ABORT = b"cmd=abort exitcode=1\n"


class WatchedRank:
    """The parent of this process, until it ends."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job = job
        self.memory = mmap(job["memory"], SIZE)
        self._life = -1
        self._lived = time.monotonic()
        self._gone: float | None = None
        try:
            self.ends = [os.pidfd_open(job["parent"])]
        except (AttributeError, OSError):  # not on all systems
            self.ends = []
        """A file that becomes readable when the rank ends."""

    def report(self) -> dict[str, Any]:
        """Reads the rank's report from its records, and looks whether it runs."""
        report = REPORT.read(self.memory)
        time_s = time.monotonic()
        if (life := report.pop("life")) != self._life:
            self._life = life
            self._lived = time_s
        still = time_s - report.pop("moved")
        lifeless = time_s - self._lived
        if still <= lifeless + EVERY_S:  # the place was written before the last move
            report["place"] = ""
        return report | {
            "rank": self._job["rank"],
            "still": still,
            "lifeless": lifeless,
            "done": report["doing"].startswith((FINISHED, EXITED, FAILED)),
            "left": report["doing"] == LEFT,
            "stopped": self._is_stopped(),
            "gone": self.gone(),
        }

    def _is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped the rank; False without /proc."""
        try:
            status = Path(f"/proc/{self._job['parent']}/stat").read_text(errors="replace")
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def gone(self) -> float | None:
        """The time at which the rank's end was noticed, None before."""
        if self._gone is None and os.getppid() != self._job["parent"]:
            self._gone = time.monotonic()
            self.ends = []
        return self._gone

    def end(self, report: Mapping[str, Any], words: str) -> None:
        """Saves the rank's last messages, requests its end, and kills it after a grace period."""
        self.record(report, words)
        VERDICT.write(self.memory, True, words)
        deadline = time.monotonic() + self._job["grace_s"]
        while not self.gone() and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self.gone():
            os.kill(self._job["parent"], signal.SIGKILL)

    def record(self, report: Mapping[str, Any], words: str) -> bool:
        """Writes the last messages to a file for `python -m fddp flight`; False without one."""
        time_s = time.monotonic()
        slots = [message(number).read(self.memory) for number in range(MESSAGES)]
        messages = list[dict[str, Any]]()
        for slot in sorted(slots, key=itemgetter("number")):
            begin = slot.pop("begin")
            end = slot.pop("end")
            if not begin:
                continue
            slot["step"] += report["before"]
            slot |= {"began_s": begin - time_s, "took_s": end - begin if end else None}
            messages.append(slot)
        summary = {
            "rank": report["rank"],
            "steps": report["steps"] + report["before"],
            "doing": report["doing"],
            "size": self._job["size"],
            "why": words,
            "began": self._job["began"],
        }
        with suppress(OSError):
            folder = Path(self._job["flight"])
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = folder / f"{report['rank']}.{os.getpid()}"
            with temporary.open("x") as file:  # another user's link at either name is not followed
                json.dump(summary | {"messages": messages}, file, indent=1)
            temporary.replace(folder / f"rank_{report['rank']}.json")
            return True
        return False

    def leave_last(self, links: Links, seconds: float, *, abort: bool) -> None:
        """Ends mpiexec (`abort`), or holds its socket until it has ended, at most `seconds`."""
        pmi_fd = self._job["pmi_fd"]
        if pmi_fd is None:
            return
        # First, so that the other watchers do not wait for this watcher.
        for link in links:
            link.close()
        if abort:
            with suppress(OSError):
                os.write(pmi_fd, ABORT)
        else:
            wait_readable([pmi_fd], seconds)
