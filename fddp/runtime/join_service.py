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
from pathlib import Path
from typing import IO, Any

import jax

import fddp.jax_internals
from fddp.comm import Group, Journal, world_group
from fddp.jax_internals import (
    HEARTBEAT_S,
    backends_started,
    bind_gloo,
    coordination_client,
    secured,
)
from fddp.runtime.hints import origin
from fddp.runtime.join_mpi import agree_on_coordinator
from fddp.runtime.launchers import pmi_socket
from fddp.runtime.place import Launch, without_proxies
from fddp.runtime.rendezvous import meet_ranks
from fddp.runtime.watching import LEFT, Ending, end_together, poll, shared_recorder, watched

LOOSE = "127.0.0.1:0"  # the address of JAX's own service, which no rank uses
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
import service
getattr(service, sys.argv[2])(sys.argv[3], int(sys.argv[4]))
"""
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
        end_together(rank, size, _ending(rank, size), recorder)
    group = replace(world_group(all_devices(backend)), backend=backend)
    if size > 1:  # not sooner: a rank that fails before the watchers start would wait for days
        atexit.register(wait_for_all)
        undo.callback(_leave, service_files, recorder, previous_hook, adopted)
    return watched(group, recorder, file, stall_s, service_files, pmi_socket(launch))


def all_devices(backend: str) -> list[Any]:
    """The devices of all processes; refuses a backend that does not connect them."""
    cpus = on_cpus()
    if backend == "nccl" and cpus:
        raise RuntimeError(
            "backend 'nccl' needs GPUs, and JAX finds none here; use 'gloo' or 'mpi'."
        )
    if backend == "gloo" and not cpus:
        raise RuntimeError(
            f"backend 'gloo' connects CPUs, and JAX uses {jax.default_backend()!r} here; set "
            "JAX_PLATFORMS=cpu, or use 'nccl'."
        )
    return jax.devices()


def on_cpus() -> bool:
    """Starts JAX's devices, of all processes that are connected; True if they are CPUs."""
    return jax.default_backend() == "cpu"


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


def _ending(rank: int, size: int) -> Ending:
    # JAX has no public interface to its coordination service. Every process of jax.distributed is
    # already connected to it.
    client = coordination_client()

    def messages(topic: str) -> list[str]:
        try:
            return [message for _, message in client.key_value_dir_get(f"fddp/{topic}/")]
        except jax.errors.JaxRuntimeError:  # the service went down with rank 0
            return []

    def tell(message: str, topic: str = "failed") -> None:
        try:
            client.key_value_set(f"fddp/{topic}/{rank}", message, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return

    def abort() -> None:
        own = [message for message in messages("failed") if message.startswith(f"rank {rank}:")]
        tell("".join(own[:1]), "gone")
        os._exit(1)

    return Ending(
        tell=tell,
        all_failed=lambda seconds: poll(lambda: len(messages("failed")) == size, seconds),
        cause=lambda: next(filter(None, messages("gone")), None),
        abort=abort,
    )


### JAX's coordination service


def start_coordinator(bind: str, rank: int, size: int) -> tuple[str, tuple[int, ...]]:
    """Starts the service next to rank 0; every rank calls this.

    The service listens at `bind`, host:port. JAX's variable replaces any address but loopback. With
    certificates (`secured`) JAX's own service listens there.

    Returns the address for JAX's own service to listen at, and the files that rank 0 and its
    watcher hold open: the separate service ends when they close.
    """
    if not bind.startswith("127.0.0.1:"):
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind)
    if secured():
        return bind, ()
    if rank:
        return LOOSE, ()
    return LOOSE, (_serve(bind, size),)


def wait_for_all() -> None:
    # JAX would wait five minutes, and a rank may evaluate for longer.
    client = coordination_client()
    with suppress(jax.errors.JaxRuntimeError):
        if client is not None:
            client.wait_at_barrier("fddp/end", 1000 * HEARTBEAT_S)


def start_service(how: str, address: str, size: int, stdin: int) -> None:
    """Starts a function of `jax_internals/service.py` in a process that outlives this one."""
    folder = Path(fddp.jax_internals.__file__).parent
    # A new session: a signal to rank 0's process group must not end the service. Its log is
    # dropped: the ranks report the same in our words.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE, str(folder), how, address, str(size)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    answers: IO[bytes] | Any = process.stdout
    with answers:
        answer = answers.readline().decode().strip()
    process.returncode = 0  # never waited for: it outlives this process
    if answer != "listens":
        raise RuntimeError(
            f"JAX's coordination service did not start at {address}: "
            f"{answer or 'it ended at once'}."
        )


def _serve(address: str, size: int) -> int:
    read_end, write_end = os.pipe()
    try:
        start_service("serve", address, size, read_end)
    except RuntimeError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return write_end
