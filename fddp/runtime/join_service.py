"""Joins and leaves the world of `jax.distributed`, over Gloo or NCCL.

JAX runs its coordination service inside rank 0. When rank 0 dies, JAX ends all other processes with
its own stack traces, before fddp can report which rank died where. So fddp runs the service in a
process next to rank 0, which it outlives.
"""

import atexit
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import jax

from fddp.comm import Group, Journal, world_group
from fddp.jax_internals import (
    HEARTBEAT_S,
    backends_started,
    bind_gloo,
    coordination_client,
    secured,
    service,
)
from fddp.runtime.hints import origin
from fddp.runtime.join_mpi import agree_on_coordinator
from fddp.runtime.launchers import pmi_socket
from fddp.runtime.place import Launch, without_proxies
from fddp.runtime.rendezvous import meet_ranks
from fddp.runtime.watching import LEFT, end_together, poll, shared_recorder, watched

LOOSE = "127.0.0.1:0"  # the address of JAX's own service, which no rank uses
LATE = (
    "JAX had started before fddp.init was called (an array was made, a function ran, or "
    "jax.devices() was called, perhaps by an imported module), and cannot join other processes "
    "after that: call fddp.init() first in the script, before such imports"
)


def join_service(
    backend: str, launch: Launch, timeout_s: float, stall_s: float | None, undo: ExitStack
) -> Group:
    """Joins or adopts `jax.distributed`; `undo` receives the calls by which it is left."""
    adopted = jax.distributed.is_initialized()
    service_files = ()
    if launch.size > 1 and not adopted:
        service_files = _join(backend, launch, timeout_s)
    rank = jax.process_index()
    size = jax.process_count()
    recorder, file = shared_recorder(size)
    previous_hook = sys.excepthook
    if size > 1:
        _end_together(rank, size, recorder)
    group = replace(world_group(all_devices(backend)), backend=backend)
    if size > 1:  # not sooner: a rank that fails before the watchers start would wait for days
        atexit.register(wait_for_all)
        undo.callback(_leave, service_files, recorder, previous_hook, adopted)
    return watched(group, recorder, file, stall_s, service_files, pmi_socket(launch))


def all_devices(backend: str) -> list[Any]:
    """The devices of all processes; refuses a backend that does not connect them."""
    platform = jax.default_backend()
    if backend == "nccl" and platform == "cpu":
        raise RuntimeError(
            "backend 'nccl' needs GPUs, and JAX finds none here; use 'gloo' or 'mpi'."
        )
    if backend == "gloo" and platform != "cpu":
        raise RuntimeError(
            f"backend 'gloo' connects CPUs, and JAX uses {platform!r} here; set "
            "JAX_PLATFORMS=cpu, or use 'nccl'."
        )
    return jax.devices()


def _leave(
    service_files: Sequence[int],
    journal: Journal,
    previous_hook: Callable[..., object],
    adopted: bool,
) -> None:
    """Waits until all ranks leave. Afterwards their end does not end this process."""
    wait_for_all()
    atexit.unregister(wait_for_all)
    try:
        if not adopted:
            jax.distributed.shutdown()
    finally:
        # The watcher of rank 0 outlives all other ranks: it holds their JAX's service.
        journal.say(LEFT)
        sys.excepthook = previous_hook
        for file in service_files:
            os.close(file)


def _join(backend: str, launch: Launch, timeout_s: float) -> tuple[int, ...]:
    """Starts `jax.distributed`; returns the files that keep its service alive."""
    problem = ""
    if backends_started():  # reported before it waits for other ranks
        problem = LATE
        print(f"fddp: rank {launch.rank} of {launch.size}: {problem}.", file=sys.stderr, flush=True)
    coordinator = launch.coordinator or agree_on_coordinator(launch)
    job, whence = launch.job, origin(launch, os.environ)
    meeting = meet_ranks(launch.rank, launch.size, coordinator, timeout_s, problem, job, whence)
    if secured():  # certificates are issued for names, not for addresses
        bind = f"[::]:{coordinator.rsplit(':', 1)[1]}"
        meeting = meeting._replace(coordinator=coordinator, bind=bind)
    options: dict[str, Any] = {}
    if backend == "gloo":
        if meeting.host:
            bind_gloo(meeting.host)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # On CPUs no process needs a GPU, but JAX would query MPI for it, and MPI may not run.
        options["cluster_detection_method"] = "deactivate"
    else:
        if launch.local_rank is not None:
            one_is_visible = re.fullmatch("[^,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            options["local_device_ids"] = [0 if one_is_visible else launch.local_rank]
        if meeting.coordinator.startswith("127.0.0.1:"):
            # All ranks are on this host. NCCL would listen at a device that other hosts reach.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # JAX's preemption service catches SIGTERM and does nothing. Without it the signal ends a script
    # that does not call fddp.preempted.
    jax.config.update("jax_enable_preemption_service", False)
    bind, service_files = start_coordinator(meeting.bind, launch.rank, launch.size)
    try:
        with without_proxies():  # the ranks have just met without a proxy
            jax.distributed.initialize(
                meeting.coordinator,
                launch.size,
                launch.rank,
                initialization_timeout=int(max(timeout_s, 1)),
                heartbeat_timeout_seconds=HEARTBEAT_S,
                coordinator_bind_address=bind,
                **options,
            )
    except RuntimeError as error:
        raise RuntimeError(f"fddp.init could not join the other processes: {error}") from error
    return service_files


def _end_together(rank: int, size: int, journal: Journal) -> None:
    # JAX has no public interface to its coordination service. Every process of jax.distributed is
    # already connected to it.
    client = coordination_client()

    def messages(topic: str) -> list[str]:
        try:
            return [message for _, message in client.key_value_dir_get(f"fddp/{topic}/")]
        except jax.errors.JaxRuntimeError:  # the service went down with rank 0
            return []

    def publish(message: str, topic: str = "failed") -> None:
        with suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(f"fddp/{topic}/{rank}", message, allow_overwrite=True)

    def abort() -> None:
        own = [message for message in messages("failed") if message.startswith(f"rank {rank}:")]
        publish("".join(own[:1]), "gone")
        os._exit(1)

    def all_failed(seconds: float) -> bool:
        return poll(lambda: len(messages("failed")) == size, seconds)

    def cause() -> str | None:
        return next(filter(None, messages("gone")), None)

    end_together(rank, size, journal, all_failed, abort, publish, cause)


### JAX's coordination service


def start_coordinator(bind: str, rank: int, size: int) -> tuple[str, tuple[int, ...]]:
    """Starts the service at `bind` on rank 0; returns JAX's own address, and files to hold open."""
    if not bind.startswith("127.0.0.1:"):
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind)
    if secured():  # only JAX's own service has certificates
        return bind, ()
    if rank:
        return LOOSE, ()
    return LOOSE, (start_service("serve", bind, size),)


def wait_for_all() -> None:
    # JAX would wait five minutes, and a rank may evaluate for longer.
    client = coordination_client()
    with suppress(jax.errors.JaxRuntimeError):
        if client is not None:
            client.wait_at_barrier("fddp/end", 1000 * HEARTBEAT_S)


def start_service(how: str, address: str, size: int) -> int:
    """Starts a function of `jax_internals/service.py` in a process, which outlives this one."""
    # A new session: a signal to rank 0's process group must not end the service. Its log is
    # dropped: the ranks report the same in our words.
    process = subprocess.Popen(
        [sys.executable, "-P", service.__file__, how, address, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.returncode = 0  # never waited for: it outlives this process
    files: Any = process.stdin, process.stdout
    with files[0] as stdin, files[1] as stdout:
        answer = stdout.readline().decode().strip()
        if answer != "listens":
            raise RuntimeError(
                f"JAX's coordination service did not start at {address}: "
                f"{answer or 'it ended at once'}."
            )
        return os.dup(stdin.fileno())  # `serve` ends when all its holders have closed it
