"""The world of this process: joined once, at the start of a script, and left at its end or before.

Source: `torch.distributed.init_process_group`.
"""

import importlib.util
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.comm import Group, Journal, world_group
from fddp.jax_internals import cache_small_programs
from fddp.runtime.freed_memory import keep_freed_memory
from fddp.runtime.hints import hint
from fddp.runtime.jaxlib_faults import remark
from fddp.runtime.join_mpi import join_mpi
from fddp.runtime.join_service import join_service
from fddp.runtime.launchers import launcher_variables, read_launch
from fddp.runtime.packages import installed
from fddp.runtime.place import Launch
from fddp.runtime.watching import FAILED, follows_another, write_stderr
from fddp.wording import check_choice, check_has, check_seconds, check_switch, check_whole

JOINED = "FDDP_JOINED"  # the process that joined, for processes that it starts
BACKENDS = ("nccl", "gloo", "mpi", "local")
NOT_ELASTIC = {
    "mpi": "elastic=True needs backend 'gloo': an MPI job ends with its first dead rank. Start the "
    "ranks by `python -m fddp run --elastic`; over MPI, `python -m fddp run --restarts` starts the "
    "whole job again.",
    "nccl": "elastic=True needs backend 'gloo': NCCL connects through JAX's coordination service, "
    "which ends with its first dead rank. On GPUs, `python -m fddp run --restarts` starts the "
    "whole job again.",
}


def init(
    backend: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    coordinator: str | None = None,
    timeout_s: float = 300.0,
    stall_s: float | None = None,
    elastic: bool = False,
) -> Group:
    """Joins the other processes of this job and returns the group of all replicas.

    Call it once, before any JAX computation. A second call without arguments returns the same
    group. From then on an uncaught exception on one rank ends the script on all ranks. An
    initialized `jax.distributed` is adopted.

    Args:
      backend: "nccl" (GPUs), "gloo" (CPUs), "mpi" (mpi4jax) or "local" (the devices of this
        process). None: local for a single process, else nccl with GPUs. Without GPUs it is mpi
        under mpirun if mpi4jax is installed, else gloo.
      rank: rank of this process; with `size`, it overrides the launcher.
      size: number of processes.
      coordinator: host:port of rank 0, for nccl and gloo. None: that of the launcher, or one agreed
        on over MPI.
      timeout_s: seconds to wait for the other processes. After five seconds each rank reports the
        ranks that it waits for.
      stall_s: seconds without progress, while ranks wait in a step, after which all ranks report
        the stuck ranks; after twice as many seconds all end. A rank that evaluates, compiles or
        waits for data has twenty times as many. None: 30, or ten steps if they take longer.
      elastic: True: ranks may end and late ranks may join while `fddp.elastic.Trainer` trains, on
        gloo. Then `size` is the maximum, and the group is that of the ranks at the start.

    Returns:
      The group.

    Raises:
      ValueError: the backend is unknown, the ranks contradict each other, a value is not a number,
        or a second call has other arguments.
      RuntimeError: the backend cannot start here, or JAX has already started and can join no
        processes.

    Example:
      >>> import fddp
      >>> fddp.init().rank
      0
    """
    check_choice("backend", backend, (*BACKENDS, None))
    for name, seconds in (("timeout_s", timeout_s), ("stall_s", stall_s)):
        if seconds is not None:
            check_seconds(name, seconds)
    if rank is not None:
        rank = check_whole("rank", rank, 0)
    if size is not None:
        size = check_whole("size", size, 1)
    check_switch("elastic", elastic)
    if elastic and backend in NOT_ELASTIC:
        raise ValueError(NOT_ELASTIC[backend])
    request = (backend, rank, size, coordinator, elastic)
    cache_small_programs()
    if not _has_gpus():
        keep_freed_memory()
    if _started:
        if (elastic or request[:4] != (None,) * 4) and request != _started[0].request:
            raise ValueError(
                "fddp.init was called before with (backend, rank, size, coordinator, elastic) = "
                f"{_started[0].request} and now with {request}; a process joins only one world: "
                "use the first group, or divide it with group.subgroup."
            )
        return _started[0].group
    undo = ExitStack()
    launch = _with_arguments(read_launch(os.environ), rank, size, coordinator)
    if backend != "local" and os.environ.get(JOINED) == _mark(os.getppid(), launch):
        raise RuntimeError(
            f"fddp.init: rank {launch.rank} of {launch.size} has started this process, which "
            "has inherited its variables: call fddp.init('local') in it, or start it without "
            f"{', '.join(launcher_variables(os.environ))}; fddp.launch starts ranks of their own."
        )
    if launch.size > 1:
        os.environ[JOINED] = _mark(os.getpid(), launch)
    if elastic:
        group = _elastic(backend, launch, timeout_s, stall_s, undo)
    else:
        if backend != "local" and not jax.distributed.is_initialized():
            _say(launch, hint(launch, os.environ))
        group = _start(backend or _pick(launch), launch, timeout_s, stall_s, undo)
        if jax.default_backend() == "cpu":
            _say(launch, remark(installed("jaxlib") or "", os.environ.get("XLA_FLAGS", "")))
    _started.append(World(request, group, undo))
    return group


def shutdown() -> None:
    """Leaves the world of `init`; every rank calls it and waits until all ranks have called it.

    Afterwards this process is independent: it computes on its own devices, may take any time, and
    ends or fails without other ranks. The group is no longer valid; arrays on this process's
    devices are. A rank at the end of its script counts as having called this.

    After a world of one process `init` may be called again. JAX joins other processes only once, so
    after a world of several processes only `fddp.init("local")` is possible. Without a world it
    does nothing.

    Raises:
      RuntimeError: the backend is "mpi": MPI can be joined and left only once, and mpiexec ends all
        ranks if one fails later.

    Example:
      >>> import fddp
      >>> group = fddp.init()
      >>> fddp.shutdown()

    Source: `torch.distributed.destroy_process_group`.
    """
    if not _started:
        return
    if _started[0].group.backend == "mpi" and _started[0].group.processes > 1:
        raise RuntimeError(
            "fddp.shutdown: backend 'mpi' ends with the process, because mpiexec ends all ranks "
            "if a rank fails, and MPI starts only once per process; end the script, or use "
            "fddp.init('gloo')."
        )
    _started.pop().undo.close()


def renew(group: Group) -> None:
    """Replaces the group of `init`, which has ended; see `fddp.elastic`."""
    if _started:
        _started[0] = _started[0]._replace(group=group)


def on_leaving(undo: Callable[[], object]) -> None:
    """Makes `shutdown` call `undo` before it waits for the other ranks."""
    _started[0].undo.callback(undo)


def group_of(call: str, group: Group | None) -> Group:
    """Returns the group argument of the public function `call`, or the group of `init` for None."""
    if group is not None:
        kind = "a fddp.Group, for example from fddp.init() or fddp.mesh_group"
        check_has("make_subgroup", f"fddp.{call}: group", group, kind)
    cache_small_programs()  # the folder may be set after `init`
    return group or init()


def fails(error: BaseException) -> bool:
    """Records this rank's failure as a cause; False if it only follows from another rank's end."""
    if not _started:
        return True
    journal = _started[0].group.journal
    if follows_another(error, journal):
        return False
    journal.say(FAILED)
    return True


def _mark(process: int, launch: Launch) -> str:
    """Names a process and its place: its children inherit the place, though they are no ranks."""
    return f"{process} {launch.rank} {launch.size} {launch.coordinator}"


class World(NamedTuple):
    """A joined world."""

    request: tuple
    """Arguments of `init`."""
    group: Group
    undo: ExitStack
    """Calls that leave it."""


# Empty or one world: the state is process-wide, as that of MPI_Init and jax.distributed.
_started: list[World] = []


def _pick(launch: Launch) -> str:
    if jax.distributed.is_initialized():
        return "gloo" if jax.default_backend() == "cpu" else "nccl"
    if launch.size == 1:
        return "local"
    if _has_gpus():
        return "nccl"
    if importlib.util.find_spec("mpi4jax") is None:
        return "gloo"
    if launch.may_be_mpi and launch.coordinator:  # without a coordinator an error names mpi
        # MPI_Init cannot be tried: an MPI without support for this PMI ends the process (Open MPI
        # without PMIx, MPICH under PMIx). MPICH's UCX sends longer lines than Slurm's pmi2 reads.
        launcher = launch.launcher
        if launch.pmi:
            launcher = f"srun --mpi={launch.pmi}"
        _say(launch, f"{launcher}: backend 'gloo'; fddp.init('mpi') takes MPI, if it starts there.")
    if not launch.by_mpi:
        return "gloo"
    if launch.coordinator:  # ranks with a coordinator can do without MPI
        size = import_module("mpi4py.MPI").COMM_WORLD.size
        if size != launch.size:
            _say(launch, f"{launch.launcher} says {launch.size} ranks, MPI {size}: backend 'gloo'.")
            return "gloo"
    return "mpi"


def _say(launch: Launch, line: str) -> None:
    if line and launch.rank == 0:
        write_stderr(line)


def _has_gpus() -> bool:
    """Predicts JAX's use of GPUs. JAX's backends must not start before jax.distributed."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return (
        plugins
        and Path("/dev/nvidiactl").exists()
        and (not platforms or "cuda" in platforms or "gpu" in platforms)
    )


def _start(
    backend: str, launch: Launch, timeout_s: float, stall_s: float | None, undo: ExitStack
) -> Group:
    if backend == "local":
        return replace(world_group(jax.local_devices()), backend="local", journal=Journal())
    if backend == "mpi":
        return join_mpi(launch, stall_s)
    return join_service(backend, launch, timeout_s, stall_s, undo)


def _elastic(
    backend: str | None, launch: Launch, timeout_s: float, stall_s: float | None, undo: ExitStack
) -> Group:
    over_mpi = launch.by_mpi and not launch.coordinator
    if backend is None and (over_mpi or _has_gpus()):
        raise ValueError(NOT_ELASTIC["mpi" if over_mpi else "nccl"])
    # A room above this one, which only elastic jobs load.
    return import_module("fddp.elastic").join_job(launch, timeout_s, stall_s, undo)


def _with_arguments(
    launch: Launch, rank: int | None, size: int | None, coordinator: str | None
) -> Launch:
    if (rank is None) != (size is None):
        raise ValueError(f"rank and size belong together, got rank={rank} and size={size}.")
    if rank is not None and size is not None:
        launch = Launch("fddp.init's arguments", rank, size, coordinator=launch.coordinator)
    return replace(launch, coordinator=coordinator or launch.coordinator)
