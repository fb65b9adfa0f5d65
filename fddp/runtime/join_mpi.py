"""Joins the world of MPI. The ranks of an mpiexec find each other by its PMI."""

import importlib.util
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fddp.comm import Group, mpi_group
from fddp.runtime.launchers import pmi_socket
from fddp.runtime.mpi_vendors import import_mpi4jax, small_memory
from fddp.runtime.place import Launch
from fddp.runtime.watching import end_together, flush_output, poll, shared_recorder, watched

READ_S = 1.0  # for mpiexec to pass a line on


def join_mpi(launch: Launch, stall_s: float | None) -> Group:
    """Starts MPI and returns the watched group of its world; `stall_s` as in `fddp.init`."""
    # mpi4jax warns about every JAX newer than its own release. fddp's JAX is tested with it.
    os.environ.setdefault("MPI4JAX_NO_WARN_JAX_VERSION", "1")
    missing = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"backend 'mpi' needs {' and '.join(missing)}, not installed here: pip install "
            f"{' '.join(missing)} (and mpich where there is no system MPI), or use backend 'gloo'."
        )
    comm = _world(launch, "use backend 'gloo'")
    recorder, file = shared_recorder(comm.size)
    if comm.size > 1:  # first, so that one rank reports an error of all ranks in full
        separate = comm.Clone()
        all_failed = lambda seconds: poll(separate.Ibarrier().Test, seconds)  # noqa: E731
        end_together(comm.rank, comm.size, recorder, all_failed, lambda: separate.Abort(1))
    import_mpi4jax()
    _forget_shared_memory(comm)
    return watched(mpi_group(comm), recorder, file, stall_s, pmi_fd=pmi_socket(launch))


def agree_on_coordinator(launch: Launch) -> str:
    """Picks a free port on rank 0 and broadcasts its host:port over MPI."""
    if not launch.by_mpi or importlib.util.find_spec("mpi4py") is None:
        remedy = "start the ranks with mpiexec"
        if launch.may_be_mpi:
            remedy = "take fddp.init('mpi'), if MPI starts there"
        elif launch.by_mpi:
            remedy = "pip install mpi4py; without MPI, python -m fddp run starts ranks on one host"
        raise ValueError(
            f"no address of rank 0 comes from {launch.launcher}: set FDDP_COORDINATOR=host:port, "
            f"equal on all ranks, give fddp.init(coordinator='host:port'), or {remedy}."
        )
    comm = _world(launch, "set FDDP_COORDINATOR=host:port")
    host = socket.gethostname()
    if len(set(comm.allgather(host))) == 1:
        host = "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return comm.bcast(f"{host}:{probe.getsockname()[1]}", root=0)


def _forget_shared_memory(comm: Any) -> None:
    """Removes the files of MPICH's shared memory: MPICH does so at its end, a killed job never."""
    # After the barrier all ranks of this host have mapped it. The mappings outlive the files.
    comm.Barrier()
    with suppress(OSError):
        for path in set(re.findall(r"/dev/shm/mpich_shm\S+", Path("/proc/self/maps").read_text())):
            Path(path).unlink(missing_ok=True)


def _world(launch: Launch, otherwise: str) -> Any:
    """Returns MPI's world; raises, with `otherwise` as advice, if it contradicts the launcher."""
    if launch.local_size == launch.size:
        # All ranks are on this host. By default MPICH's transport listens at the devices that other
        # hosts reach.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if launch.launcher == "Hydra" and (problem := small_memory(launch.local_size or 1)):
        flush_output(f"fddp: {problem}.\n")
        time.sleep(READ_S)  # a crash would take the line along
    from mpi4py import MPI  # loads the MPI library for mpi4jax's extension

    comm = MPI.COMM_WORLD
    if launch.launcher != "alone" and (comm.rank, comm.size) != (launch.rank, launch.size):
        raise RuntimeError(
            f"this is rank {launch.rank} of {launch.size} according to {launch.launcher}, and rank "
            f"{comm.rank} of {comm.size} according to MPI: start it with the mpiexec of the MPI "
            f"that mpi4py was built with ({MPI.get_vendor()[0]}), or {otherwise}."
        )
    return comm
