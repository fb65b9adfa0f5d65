"""Joins the world of MPI, under an mpiexec whose ranks find each other by its PMI."""

import importlib.util
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from fddp.comm import Group, mpi_group, poll
from fddp.runtime.launchers import pmi_socket
from fddp.runtime.mpi_vendors import import_mpi4jax
from fddp.runtime.place import Launch
from fddp.watching import Ending, end_together, shared_recorder, watched


def join_mpi(launch: Launch, stall_s: float | None) -> Group:
    """Starts MPI and makes a group of its world.

    Args:
      launch: how this process was started.
      stall_s: as of `fddp.init`.

    Returns:
      The group, watched.

    Raises:
      RuntimeError: MPI is not installed, or contradicts the launcher.
    """
    # mpi4jax warns of every JAX newer than the one it was released with; ours is tested with it.
    os.environ.setdefault("MPI4JAX_NO_WARN_JAX_VERSION", "1")
    missing = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"backend 'mpi' needs {' and '.join(missing)}, not installed here: pip install "
            f"{' '.join(missing)} (and mpich where there is no system MPI), or use backend 'gloo'."
        )
    comm = _world(launch, "use backend 'gloo'")
    recorder, file = shared_recorder(comm.size)
    if comm.size > 1:  # first of all, so that an error of all ranks is told in full by one of them
        end_together(comm.rank, comm.size, _ending(comm.Clone()), recorder.journal())
    import_mpi4jax()
    _forget_shared_memory(comm)
    return watched(mpi_group(comm), recorder, file, stall_s, pmi_fd=pmi_socket(launch))


def agree_on_coordinator(launch: Launch) -> str:
    """Lets rank 0 pick a free port, and tells all ranks over MPI where to meet it.

    Args:
      launch: how this process was started.

    Returns:
      host:port.

    Raises:
      ValueError: its launcher names no place, and starts no MPI that can be asked.
    """
    if not launch.by_mpi or importlib.util.find_spec("mpi4py") is None:
        more = "install mpi4py" if launch.by_mpi else "start the ranks with mpiexec"
        more = "take fddp.init('mpi'), if MPI starts there" if launch.may_be_mpi else more
        raise ValueError(
            f"{launch.launcher} does not say where rank 0 is: set FDDP_COORDINATOR=host:port, equal on all ranks, give "
            f"fddp.init(coordinator='host:port'), or {more}."
        )
    comm = _world(launch, "set FDDP_COORDINATOR=host:port")
    host = socket.gethostname() if len(set(comm.allgather(socket.gethostname()))) > 1 else "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return comm.bcast(f"{host}:{probe.getsockname()[1]}", root=0)


def mpi_size() -> int:
    """The number of ranks that MPI finds."""
    return importlib.import_module("mpi4py.MPI").COMM_WORLD.size


def _forget_shared_memory(comm: Any) -> None:
    """Takes MPICH's shared memory out of the file system; MPICH does so when it ends, and a killed job never."""
    comm.Barrier()  # all ranks of this host have it now, and it is there until the last of them ends
    with suppress(OSError):
        for path in set(re.findall(r"/dev/shm/mpich_shm\S+", Path("/proc/self/maps").read_text())):
            Path(path).unlink(missing_ok=True)


def _world(launch: Launch, otherwise: str) -> Any:
    """MPI's own world. Raises an error with what else to do where the launcher speaks of another one."""
    if launch.local_size == launch.size:
        # Else MPICH's transport listens at the devices that other hosts reach, though all ranks are on this one.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    from mpi4py import MPI  # it loads the MPI library that mpi4jax's extension then finds

    comm = MPI.COMM_WORLD
    if launch.launcher != "alone" and (comm.rank, comm.size) != (launch.rank, launch.size):
        raise RuntimeError(
            f"{launch.launcher} says that this is rank {launch.rank} of {launch.size}, MPI that it is rank {comm.rank} "
            f"of {comm.size}: start it with the mpiexec of the MPI that mpi4py was built with "
            f"({MPI.get_vendor()[0]}), or {otherwise}."
        )
    return comm


def _ending(comm: Any) -> Ending:
    def all_failed(seconds: float) -> bool:
        return poll(comm.Ibarrier().Test, seconds)

    return Ending(tell=lambda message: None, all_failed=all_failed, cause=lambda: None, abort=lambda: comm.Abort(1))
