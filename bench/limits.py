"""A limit to the memory of a process, which the kernel holds it to."""

import os
import resource
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")  # of cgroups v1
UNIFIED = Path("/sys/fs/cgroup")
MIB = 2**20


def limit(mib: int) -> str:
    """Limits the memory of this process from now on; returns the name of the limit.

    A group of the kernel's counts resident memory. If none can be made, the heap is limited,
    including reserved memory that is never touched.
    """
    for root, name in ((GROUPS, "memory.limit_in_bytes"), (UNIFIED, "memory.max")):
        group = root / f"fddp-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(str(mib * MIB))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            continue
        return f"cgroup, {name}"
    resource.setrlimit(resource.RLIMIT_DATA, (mib * MIB, mib * MIB))
    return "RLIMIT_DATA"


def forget() -> None:
    """Removes the groups of processes that are gone."""
    for root in (GROUPS, UNIFIED):
        for group in root.glob("fddp-*"):
            if not (group / "cgroup.procs").read_text().strip():
                group.rmdir()
