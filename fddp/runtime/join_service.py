"""Joins and leaves the world of `jax.distributed`: processes that meet at a coordinator, over Gloo or NCCL."""

import atexit
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax

from fddp.comm import Group, Journal, poll, world_group
from fddp.jax_internals import HEARTBEAT_S, backends_started, coordination_client, secured
from fddp.runtime.coordinator import start_coordinator, wait_for_all
from fddp.runtime.join_mpi import agree_on_coordinator
from fddp.runtime.launchers import pmi_socket
from fddp.runtime.place import Launch
from fddp.runtime.reception import Meeting
from fddp.runtime.rendezvous import meet
from fddp.watching import LEFT, Ending, end_together, shared_recorder, watched

LATE = (
    "JAX had started before fddp.init was called (an array was made, a function ran, or jax.devices() was called), and "
    "joins no other processes after that: call fddp.init() before it, first of all in the script"
)


def join_service(backend: str, launch: Launch, timeout_s: float, stall_s: float | None, undo: ExitStack) -> Group:
    """Joins `jax.distributed`, or adopts the one that is there, and makes a group of all devices.

    Args:
      backend: "gloo" or "nccl".
      launch: how this process was started.
      timeout_s: as of `fddp.init`.
      stall_s: as of `fddp.init`.
      undo: gets the calls that are to be made when this process leaves the world.

    Returns:
      The group, watched.

    Raises:
      RuntimeError: the others cannot be joined; says why.
      ValueError: nobody says where to meet.
    """
    adopted = jax.distributed.is_initialized()
    kept = () if adopted or launch.size == 1 else _join(backend, launch, timeout_s)
    if backend == "nccl" and jax.default_backend() == "cpu":
        raise RuntimeError("backend 'nccl' needs GPUs, and JAX finds none here; use 'gloo' or 'mpi'.")
    rank = jax.process_index()
    size = jax.process_count()
    recorder, file = shared_recorder(size)
    journal = recorder.journal()
    before = sys.excepthook
    if size > 1:
        end_together(rank, size, _ending(rank, size), journal)
    group = replace(world_group(jax.devices()), backend=backend)
    if size > 1:  # not sooner: a rank that fails before the watchers are there would wait for days
        atexit.register(wait_for_all)
        undo.callback(_leave, kept, journal, before, adopted)
    return watched(group, recorder, file, stall_s, kept, pmi_socket(launch))


def _leave(kept: Sequence[int], journal: Journal, before: Any, adopted: bool) -> None:
    """Waits until all leave, and goes on alone: the others' end no longer concerns this process."""
    wait_for_all()
    atexit.unregister(wait_for_all)
    try:
        if not adopted:
            jax.distributed.shutdown()
    finally:
        # The watcher of rank 0 stays until the others have gone: it holds the service that their JAX talks to.
        journal.say(LEFT)
        sys.excepthook = before
        for file in kept:
            os.close(file)


def _join(backend: str, launch: Launch, timeout_s: float) -> tuple[int, ...]:
    """Starts `jax.distributed`; returns the files that rank 0 and its watcher hold as long as it lasts."""
    late = LATE if backends_started() else ""
    if late:  # before it waits for anybody
        print(f"fddp: rank {launch.rank} of {launch.size}: {late}.", file=sys.stderr, flush=True)
    coordinator = launch.coordinator or agree_on_coordinator(launch)
    met = meet(launch.rank, launch.size, coordinator, timeout_s, late, launch.job)
    if secured():  # certificates hold for names
        met = Meeting(coordinator, f"[::]:{coordinator.rsplit(':', 1)[1]}")
    if backend == "gloo":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service takes SIGTERM and does nothing: a script that does not ask (fddp.preempted) ends by it.
    jax.config.update("jax_enable_preemption_service", False)
    service = start_coordinator(met.bind, launch.rank, launch.size)
    try:
        jax.distributed.initialize(
            met.coordinator,
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


def _own_gpu(local_rank: int) -> int:
    """Picks this process's own GPU of those that it sees: the only one, where the launcher shows it no other."""
    return 0 if re.fullmatch("[^,]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")) else local_rank


def _ending(rank: int, size: int) -> Ending:
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
