"""An island's client of the keeper, the server that rank 0 starts.

No wait is unbounded: the server sends beats twice a second, and their absence for as long as the
job may stall (`fddp.init(stall_s=)`) is an error.
"""

import atexit
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from fddp.buckets import is_shard
from fddp.comm import (
    Group,
    new_secret,
    nothing_to_compare,
    on_one_host,
    own_addresses,
    signature,
    verify,
)
from fddp.jax_internals import packed
from fddp.local_training.frames import hear, hear_arrays, send_frame
from fddp.local_training.island_runner import Keeper
from fddp.local_training.island_state import Island, copy_leaves, version_of
from fddp.local_training.keeper import ServerConfig
from fddp.local_training.merging import Contribution, SharedParams, merge_forms, merging_of
from fddp.optim import LocalSteps
from fddp.step import TrainState

CONNECT_S = 5.0
RUN = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from fddp.local_training.keeper import main; main()"
)


class Place(NamedTuple):
    """The address and secret of the server."""

    addresses: list[str]
    port: int
    token: str


def join_keeper(steps: LocalSteps, island: Island, state: TrainState) -> Keeper:
    """Starts the server next to rank 0, and connects this island; every rank calls it.

    `state` is this island's first one. When a training resumes, the latest shared parameters of all
    islands win. If the start or a connection fails, it raises RuntimeError on every rank.
    """
    group = island.replica.group
    newest = _newest(group, state)
    hosts = ["127.0.0.1"] if on_one_host(group) else own_addresses()

    def start() -> Place | None:
        if not group.is_main:
            return None
        return _start(steps, group.processes // island.members.processes, newest, state, hosts)

    place = group.broadcast_object(
        verify(group, "keeper of the shared parameters", start, nothing_to_compare)
    )
    members = island.members

    def connect() -> socket.socket | Any:
        return _connect(place, group, island.number) if members.is_main else None

    connection = verify(group, "way to the keeper", connect, nothing_to_compare)
    if members.is_main:
        atexit.register(connection.close)

    def told(ask: Callable[[], SharedParams], like: SharedParams) -> SharedParams:
        """Sends a request from the island's first process, and broadcasts the reply."""

        def asked() -> SharedParams:
            with _words(group, connection):
                return ask()

        if members.processes == 1:
            return asked()
        reply = verify(
            members, "exchange", lambda: asked() if members.is_main else like, nothing_to_compare
        )
        version, *leaves = members.broadcast((np.int64(reply.version), reply.params, reply.outer))
        return SharedParams(int(version), *leaves)

    def give(gradient: Contribution) -> SharedParams:
        header = {"began": gradient.began, "weight": gradient.weight, "step": gradient.step}

        def ask() -> SharedParams:
            with group.journal.message("pseudo-gradient", sum(x.nbytes for x in gradient.change)):
                send_frame(connection, header, gradient.change)
                return _answer(connection, newest._replace(outer=()))

        return told(ask, newest._replace(outer=()))

    def meet() -> SharedParams:
        def ask() -> SharedParams:
            send_frame(connection, {"meets": True})
            return _answer(connection, newest)

        with group.journal.call("meet", group.processes):
            return told(ask, newest)

    return Keeper(give, meet)


def _newest(group: Group, state: TrainState) -> SharedParams:
    """Finds the latest shared parameters of all islands, and the outer state of the same island."""
    versions = group.all_gather(np.int64(version_of(state)))
    newest = copy_leaves(state.opt_state.shared), copy_leaves(state.opt_state.outer)
    if versions.any():  # all islands of a new training have equal parameters
        newest = group.broadcast(newest, root=int(np.argmax(versions)))
    return SharedParams(int(versions.max()), *newest)


def _start(
    steps: LocalSteps, islands: int, shared: SharedParams, state: TrainState, hosts: list[str]
) -> Place:
    """Starts the server in a process on this host."""
    rule: Any = steps.quorum
    tree = jax.tree.structure(state.opt_state.shared, is_leaf=is_shard)
    params = tree.unflatten(shared.params)
    add, step = map(
        lambda f, forms: packed(f, *forms), merging_of(steps, params), merge_forms(shared)
    )
    token = new_secret()
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    bind = hosts[0] if hosts == ["127.0.0.1"] else ""
    job = ServerConfig(replace(rule, discount=None), islands, shared, add, step, token, bind, x64)
    if rule.log and not shared.version:
        Path(rule.log).write_text("")
    # In a new session, so that signals to the process group of rank 0 do not reach it.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, str(Path(__file__).parents[2])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )
    process.returncode = 0  # `Popen` does not warn about a child that is never waited for
    stdin: IO[bytes] | Any = process.stdin
    stdout: IO[bytes] | Any = process.stdout
    # The duplicate stays open until this process ends; then the server ends, too.
    os.dup(stdin.fileno())
    with stdin, stdout:
        pickle.dump(job, stdin)
        stdin.flush()
        port = stdout.readline().strip()
    if not port:
        raise RuntimeError("the keeper of the shared parameters did not start: see its output.")
    return Place(hosts, int(port), token)


def _connect(place: Place, group: Group, island: int) -> socket.socket:
    """Connects this island to the first address of the server that responds."""
    failures = []
    for host in place.addresses:
        try:
            connection = socket.create_connection((host, place.port), CONNECT_S)
            challenge = hear(connection)["challenge"]
        except (OSError, KeyError) as error:
            failures.append(f"{host}:{place.port}: {getattr(error, 'strerror', None) or error}")
            continue
        limit = group.journal.stall_s
        connection.settimeout(limit if isfinite(limit) else None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_frame(connection, {"proof": signature(place.token, challenge), "island": island})
        return connection
    raise RuntimeError(
        "the keeper of the shared parameters, on rank 0's host, cannot be reached: "
        f"{'; '.join(failures)}."
    )


def _answer(connection: socket.socket, like: SharedParams) -> SharedParams:
    """Waits for a reply with arrays like those of `like`."""
    while "version" not in (header := hear(connection)):
        if "fails" in header:
            raise RuntimeError(f"the keeper of the shared parameters failed:\n{header['fails']}")
    return SharedParams(
        header["version"],
        *(hear_arrays(connection, leaves) for leaves in (like.params, like.outer)),
    )


@contextmanager
def _words(group: Group, connection: socket.socket) -> Iterator[None]:
    """Explains an error of the connection, and closes it: a message may have ended halfway."""
    try:
        yield
    except TimeoutError:
        connection.close()
        limit = group.journal.stall_s
        raise RuntimeError(
            f"rank {group.rank} has received nothing for {limit:g} s from the keeper of the "
            "shared parameters, a process on rank 0's host: check this host and the network."
        ) from None
    except OSError as error:
        connection.close()
        raise RuntimeError(
            "the keeper of the shared parameters, a process on rank 0's host, has ended "
            f"({error}): restart from a checkpoint."
        ) from None
