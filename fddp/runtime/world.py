"""The world this process lives in: joined once, at the start of a script, and left at its end or before.

Source: `torch.distributed.init_process_group`.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.comm import Group, alone, world_group
from fddp.jax_internals import cache_small_programs
from fddp.runtime.hints import hints
from fddp.runtime.join_mpi import join_mpi, mpi_size
from fddp.runtime.join_service import join_service
from fddp.runtime.launchers import read_launch
from fddp.runtime.place import Launch
from fddp.watching import FAILED, follows_another
from fddp.wording import check_seconds, check_whole

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
        other processes that were started together, by srun or torchrun say; local for one.
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
      ValueError: unknown backend, contradicting ranks, a value that is not a number, or called
        again with other arguments.
      RuntimeError: the backend cannot be started here, or JAX has computed before and joins nobody any more.

    Example:
      >>> import fddp
      >>> fddp.init().rank
      0
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}.")
    for name, seconds in (("timeout_s", timeout_s), ("stall_s", stall_s)):
        if seconds is not None:
            check_seconds(name, seconds)
    rank = None if rank is None else check_whole("rank", rank, 0)
    size = None if size is None else check_whole("size", size, 1)
    request = (backend, rank, size, coordinator)
    cache_small_programs()
    if _started and request not in ((None,) * 4, _started[0].request):
        raise ValueError(
            f"fddp.init was called before with (backend, rank, size, coordinator) = {_started[0].request} and now with "
            f"{request}; a process joins one world: keep the first group, or cut it with group.subgroup."
        )
    if not _started:
        undo = ExitStack()
        launch = _with_arguments(read_launch(os.environ), rank, size, coordinator)
        if backend != "local" and not jax.distributed.is_initialized():
            for line in hints(launch, os.environ):
                _say(launch, line)
        group = _start(backend or _pick(launch), launch, timeout_s, stall_s, undo)
        _started.append(World(request, group, undo))
    return _started[0].group


def shutdown() -> None:
    """Leaves the world that `init` has joined; every rank calls it, and waits until all have.

    Afterwards this process is on its own: it computes on its own devices, may take any time, and ends or fails without
    the others. The group is of no use any more; arrays of this process's devices are. A rank that comes to the end of
    its script counts as one that calls this.

    With one process `init` may be called again. JAX joins other processes once in a process's life, so after a world of
    several only `fddp.init("local")` is possible. Does nothing where nothing was joined.

    Raises:
      RuntimeError: the backend is "mpi": MPI is joined and left once, and mpiexec ends all ranks if one fails later.

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
            "fddp.shutdown: backend 'mpi' is left when the process ends, for mpiexec ends all ranks if one of them "
            "fails, and MPI starts once in a process; end the script, or take fddp.init('gloo')."
        )
    _started.pop().undo.close()


def on_leaving(undo: Callable[[], object]) -> None:
    """Makes `shutdown` call a function before it waits for the others.

    Args:
      undo: the function.
    """
    init()
    _started[0].undo.callback(undo)


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
    cache_small_programs()  # the folder may be set after `init`
    return init() if group is None else group


def fails(error: BaseException) -> bool:
    """Notes that this rank fails, so that the watchers name it and none of those that are ended with it.

    Args:
      error: what was raised.

    Returns:
      False if it only follows from another rank's end.
    """
    if not _started:
        return True
    journal = _started[0].group.journal
    if follows_another(error, journal):
        return False
    journal.say(FAILED)
    return True


class World(NamedTuple):
    """The world that was joined."""

    request: tuple
    """The arguments of `init`."""
    group: Group
    undo: ExitStack
    """The calls that are to be made to leave it."""


# The process's world, as MPI_Init and jax.distributed know it.
_started: list[World] = []


def _pick(launch: Launch) -> str:
    if jax.distributed.is_initialized():
        return "nccl" if jax.default_backend() != "cpu" else "gloo"
    if launch.size == 1:
        return "local"
    if _has_gpus():
        return "nccl"
    if importlib.util.find_spec("mpi4jax") is None:
        return "gloo"
    if launch.may_be_mpi and launch.coordinator:  # without one an error says it
        # MPI_Init cannot be tried: an MPI that does not speak this PMI ends the process there (Open MPI without PMIx,
        # MPICH under PMIx), and MPICH's UCX sends Slurm's pmi2 longer lines than it reads.
        launcher = f"srun --mpi={launch.pmi}" if launch.pmi else launch.launcher
        _say(launch, f"{launcher}: backend 'gloo'; fddp.init('mpi') takes MPI, if it starts there.")
    if not launch.by_mpi:
        return "gloo"
    if launch.coordinator and (size := mpi_size()) != launch.size:  # ranks who know where to meet need no MPI
        _say(launch, f"{launch.launcher} says {launch.size} ranks, MPI {size}: backend 'gloo'.")
        return "gloo"
    return "mpi"


def _say(launch: Launch, line: str) -> None:
    if line and launch.rank == 0:
        print(f"fddp: {line}", file=sys.stderr, flush=True)


def _has_gpus() -> bool:
    """Whether JAX will use GPUs; looks without starting JAX's backends, which must not run before jax.distributed."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return plugins and Path("/dev/nvidiactl").exists() and (not platforms or "cuda" in platforms or "gpu" in platforms)


def _start(backend: str, launch: Launch, timeout_s: float, stall_s: float | None, undo: ExitStack) -> Group:
    if backend == "local":
        return replace(world_group(jax.local_devices()), backend="local", journal=alone())
    if backend == "mpi":
        return join_mpi(launch, stall_s)
    return join_service(backend, launch, timeout_s, stall_s, undo)


def _with_arguments(launch: Launch, rank: int | None, size: int | None, coordinator: str | None) -> Launch:
    if (rank is None) != (size is None):
        raise ValueError(f"rank and size belong together, got rank={rank} and size={size}.")
    if rank is not None and size is not None:
        launch = Launch("fddp.init's arguments", rank, size, coordinator=launch.coordinator)
    return replace(launch, coordinator=coordinator or launch.coordinator)
