"""The world this process lives in: joined once, at the start of a script.

Source: `torch.distributed.init_process_group`.
"""

import atexit
import importlib.util
import os
import re
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from fddp.comm import Group, mesh_group, mpi_group, poll, replica_mesh
from fddp.jax_internals import HEARTBEAT_S, coordination_client
from fddp.runtime.abort import Ending, end_together
from fddp.runtime.coordinator import start_coordinator, wait_for_all
from fddp.runtime.launchers import Launch, missing_srun, pmi_socket, read_launch
from fddp.runtime.rendezvous import meet
from fddp.runtime.vendors import import_mpi4jax
from fddp.runtime.watchdog import shared_journal, watched

BACKENDS = ("nccl", "gloo", "mpi", "local")


def init(
    backend: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    coordinator: str | None = None,
    timeout_s: float = 300.0,
    stall_s: float | None = None,
) -> Group:
    """Joins the other processes of this job and returns the group of all replicas.

    Call it once, before any JAX computation; called again without arguments it returns the same group. An uncaught
    exception on one rank then ends the script on all of them. A `jax.distributed` that is already initialized is
    adopted.

    Args:
      backend: "nccl" (GPUs), "gloo" (CPUs), "mpi" (mpi4jax) or "local" (the devices of this process). None: nccl
        where there are GPUs and several processes; under mpirun mpi if mpi4jax is installed, else gloo; gloo for
        other processes that were started together, by srun say; local for one.
      rank: this process; with `size`, wins over what the launcher says.
      size: number of processes.
      coordinator: host:port of rank 0, for nccl and gloo. None: as the launcher says, or agreed on over MPI.
      timeout_s: seconds to wait for the other processes. After five of them each rank says whom it waits for.
      stall_s: seconds after which all ranks say who is stuck, if some wait in a step and none moves; after twice as
        many all end. A rank that lives and evaluates, compiles or waits for data has twenty times as many. None: 30,
        or ten steps if they take longer.

    Returns:
      The group.

    Raises:
      ValueError: unknown backend, contradicting ranks, or called again with other arguments.
      RuntimeError: the backend cannot be started here.

    Example:
      >>> import fddp
      >>> fddp.init().rank
      0
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}.")
    for name, seconds in (("timeout_s", timeout_s), ("stall_s", stall_s)):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name} must be more than 0 seconds, got {seconds}.")
    request = (backend, rank, size, coordinator)
    if _started and request not in ((None,) * 4, _started[0][0]):
        raise ValueError(
            f"fddp.init was called before with (backend, rank, size, coordinator) = {_started[0][0]} and now with "
            f"{request}; a process joins one world: keep the first group, or cut it with group.subgroup."
        )
    if not _started:
        launch = _with_arguments(read_launch(os.environ), rank, size, coordinator)
        _started.append((request, _start(backend or _pick(launch), launch, timeout_s, stall_s)))
    return _started[0][1]


def group_of(call: str, group: Group | None) -> Group:
    """The group that a call was given, or that of `init` for None.

    Args:
      call: name of the function that was called.
      group: what it was given.

    Returns:
      The group.

    Raises:
      TypeError: it is none.
    """
    if group is not None and not isinstance(group, Group):
        raise TypeError(
            f"fddp.{call}: group must be a fddp.Group, from fddp.init() or fddp.mesh_group say, got {group!r}."
        )
    return init() if group is None else group


# The process's world, as MPI_Init and jax.distributed know it: started once, never changed.
_started: list[tuple[tuple, Group]] = []


def _pick(launch: Launch) -> str:
    if jax.distributed.is_initialized():
        return "nccl" if jax.default_backend() != "cpu" else "gloo"
    if launch.size == 1:
        _say(launch, missing_srun(launch, os.environ))
        return "local"
    if _has_gpus():
        return "nccl"
    if importlib.util.find_spec("mpi4jax") is None:
        return "gloo"
    if launch.pmi:
        # MPI_Init cannot be tried: an MPI that does not speak this PMI ends the process there (Open MPI without PMIx,
        # MPICH under PMIx), and MPICH's UCX sends Slurm's pmi2 longer lines than it reads.
        _say(launch, f"srun --mpi={launch.pmi}: backend 'gloo'; fddp.init('mpi') takes MPI, if it starts there.")
    if not launch.by_mpi:
        return "gloo"
    if launch.coordinator and (size := _mpi_size()) != launch.size:  # ranks who know where to meet need no MPI
        _say(launch, f"{launch.launcher} says {launch.size} ranks, MPI {size}: backend 'gloo'.")
        return "gloo"
    return "mpi"


def _mpi_size() -> int:
    return importlib.import_module("mpi4py.MPI").COMM_WORLD.size


def _say(launch: Launch, line: str) -> None:
    if line and launch.rank == 0:
        print(f"fddp: {line}", file=sys.stderr, flush=True)


def _has_gpus() -> bool:
    """Looked up without starting JAX's backends, which must not run before jax.distributed."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return plugins and Path("/dev/nvidiactl").exists() and (not platforms or "cuda" in platforms or "gpu" in platforms)


def _start(backend: str, launch: Launch, timeout_s: float, stall_s: float | None) -> Group:
    if backend == "local":
        return replace(mesh_group(replica_mesh(jax.local_devices())), backend="local")
    if backend == "mpi":
        return _start_mpi(launch, stall_s)
    kept = (
        [] if jax.distributed.is_initialized() or launch.size == 1 else _start_distributed(backend, launch, timeout_s)
    )
    if backend == "nccl" and jax.default_backend() == "cpu":
        raise RuntimeError("backend 'nccl' needs GPUs, and JAX finds none here; use 'gloo' or 'mpi'.")
    rank, size = jax.process_index(), jax.process_count()
    journal, file = shared_journal(size)
    if size > 1:
        end_together(rank, size, _service_ending(rank, size), journal)
    group = replace(mesh_group(replica_mesh(jax.devices())), backend=backend, journal=journal)
    if size > 1:  # not sooner: who fails before the watchers are there would wait for days
        atexit.register(wait_for_all)
    return watched(group, file, stall_s, kept, pmi_socket(launch))


def _start_mpi(launch: Launch, stall_s: float | None) -> Group:
    # mpi4jax warns of every JAX newer than the one it was released with; ours is tested with it.
    os.environ.setdefault("MPI4JAX_NO_WARN_JAX_VERSION", "1")
    missing = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"backend 'mpi' needs {' and '.join(missing)}, not installed here: pip install 'fddp[mpi]', "
            "or use backend 'gloo'."
        )
    comm = _mpi_world(launch, "use backend 'gloo'")
    journal, file = shared_journal(comm.size)
    if comm.size > 1:  # first of all, so that an error of all ranks is told in full by one of them
        end_together(comm.rank, comm.size, _mpi_ending(comm.Clone()), journal)
    import_mpi4jax()
    _forget_shared_memory(comm)
    return watched(replace(mpi_group(comm), journal=journal), file, stall_s, pmi_fd=pmi_socket(launch))


def _forget_shared_memory(comm: Any) -> None:
    """Takes MPICH's shared memory out of the file system; MPICH does so when it ends, and a killed job never."""
    comm.Barrier()  # all ranks of this host have it now, and it is there until the last of them ends
    with suppress(OSError):
        for path in set(re.findall(r"/dev/shm/mpich_shm\S+", Path("/proc/self/maps").read_text())):
            Path(path).unlink(missing_ok=True)


def _mpi_world(launch: Launch, otherwise: str) -> Any:
    """MPI's own world, which must be the one that the launcher speaks of; if it is not, what else to do."""
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


def _start_distributed(backend: str, launch: Launch, timeout_s: float) -> tuple[int, ...]:
    """Joins the world of `jax.distributed`; files that rank 0 and its watcher hold as long as it lasts."""
    if backend == "gloo":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = launch.coordinator or _agree_on_coordinator(launch)
    meet(launch.rank, launch.size, coordinator, timeout_s)
    # JAX's preemption service takes SIGTERM and does nothing: a script that does not ask (fddp.preempted) ends by it.
    jax.config.update("jax_enable_preemption_service", False)
    service = start_coordinator(coordinator, launch.rank, launch.size)
    try:
        jax.distributed.initialize(
            coordinator,
            launch.size,
            launch.rank,
            local_device_ids=None if backend == "gloo" or launch.local_rank is None else [_own_gpu(launch.local_rank)],
            initialization_timeout=int(max(timeout_s, 1)),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            coordinator_bind_address=service.bind,
            # JAX would ask MPI for this process's GPU, though on CPUs nobody needs one and MPI may not run.
            cluster_detection_method="deactivate" if backend == "gloo" else None,
        )
    except RuntimeError as error:
        raise RuntimeError(f"fddp.init could not join the other processes: {error}") from error
    return service.kept


def _agree_on_coordinator(launch: Launch) -> str:
    """Rank 0 picks a free port and tells the others over MPI."""
    if not launch.by_mpi or importlib.util.find_spec("mpi4py") is None:
        raise ValueError(
            f"{launch.launcher} does not say where rank 0 is: give fddp.init(coordinator='host:port'), set "
            "FDDP_COORDINATOR, or install mpi4py."
        )
    comm = _mpi_world(launch, "set FDDP_COORDINATOR=host:port")
    host = socket.gethostname() if len(set(comm.allgather(socket.gethostname()))) > 1 else "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return comm.bcast(f"{host}:{probe.getsockname()[1]}", root=0)


def _own_gpu(local_rank: int) -> int:
    """Which of the GPUs that this process sees is its own: the only one, where the launcher shows it no other."""
    return 0 if re.fullmatch("[^,]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")) else local_rank


def _with_arguments(launch: Launch, rank: int | None, size: int | None, coordinator: str | None) -> Launch:
    if (rank is None) != (size is None):
        raise ValueError(f"rank and size belong together, got rank={rank} and size={size}.")
    if rank is not None and size is not None:
        launch = Launch("fddp.init's arguments", rank, size, coordinator=launch.coordinator)
    return replace(launch, coordinator=coordinator or launch.coordinator)


def _mpi_ending(comm: Any) -> Ending:
    def all_failed(seconds: float) -> bool:
        return poll(comm.Ibarrier().Test, seconds)

    return Ending(tell=lambda message: None, all_failed=all_failed, cause=lambda: None, abort=lambda: comm.Abort(1))


def _service_ending(rank: int, size: int) -> Ending:
    # JAX has no public door to its coordination service, which every process of jax.distributed already talks to.
    client = coordination_client()

    def told(what: str) -> list[str]:
        try:
            return [message for _, message in client.key_value_dir_get(f"fddp/{what}/")]
        except jax.errors.JaxRuntimeError:  # the service went down with rank 0
            return []

    def tell(message: str, what: str = "failed") -> None:
        try:
            client.key_value_set(f"fddp/{what}/{rank}", message, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return

    def abort() -> None:
        tell(next((message for message in told("failed") if message.startswith(f"rank {rank}:")), ""), "gone")
        os._exit(1)

    return Ending(
        tell=tell,
        all_failed=lambda seconds: poll(lambda: len(told("failed")) == size, seconds),
        cause=lambda: next((message for message in told("gone") if message), None),
        abort=abort,
    )
