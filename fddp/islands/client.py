"""An island's client of the server, the server that rank 0 starts.

No wait is unbounded: the server sends beats twice a second, and their absence for as long as the
job may stall (`fddp.init(stall_s=)`) is an error.
"""

import atexit
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
import optax

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
from fddp.islands.island_state import Island, copy_leaves, version_of
from fddp.islands.merging import Contribution, Leaves, SharedParams, merge_forms, merging_of
from fddp.islands.protocol import receive_arrays, receive_header, send_message
from fddp.islands.quorum import Quorum
from fddp.islands.server import ServerConfig
from fddp.jax_internals import packed
from fddp.step import TrainState

CONNECT_S = 5.0
RUN = "import sys; sys.path.insert(0, sys.argv[1]); from fddp.islands.server import main; main()"


class Place(NamedTuple):
    """The address and secret of the server."""

    addresses: list[str]
    port: int
    token: str


@dataclass(frozen=True)
class Client:
    """An island's client of the server; the processes of the island call it jointly."""

    group: Group
    members: Group
    """The island's processes; the first one has the connection."""
    connection: socket.socket | Any
    newest: SharedParams
    """Arrays like those of the server."""

    def exchange(self, contribution: Contribution) -> SharedParams:
        """Sends a pseudo-gradient, and returns the latest parameters after its merge."""
        change = contribution.change
        header = {name: getattr(contribution, name) for name in ("began", "weight", "step")}

        def ask() -> SharedParams:
            with self.group.journal.message("pseudo-gradient", sum(x.nbytes for x in change)):
                return self._request(header, change, like)

        like = self.newest._replace(outer=())
        return self._jointly(ask, like)

    def meet(self) -> SharedParams:
        """Waits for the meeting of all islands, and returns the parameters and outer state."""
        with self.group.journal.call("meet", self.group.processes):
            ask = partial(self._request, {"meets": True}, (), self.newest)
            return self._jointly(ask, self.newest)

    def _jointly(self, ask: Callable[[], SharedParams], like: SharedParams) -> SharedParams:
        """Sends a request from the island's first process, and broadcasts the reply."""
        members = self.members
        if members.processes == 1:
            return ask()
        ask = ask if members.is_main else lambda: like
        reply = verify(members, "exchange", ask, nothing_to_compare)
        version, *leaves = members.broadcast((np.int64(reply.version), reply.params, reply.outer))
        return SharedParams(int(version), *leaves)

    def _request(self, header: dict[str, Any], arrays: Leaves, like: SharedParams) -> SharedParams:
        """Sends a request, and waits for a reply with arrays like those of `like`.

        After an error it closes the connection: a message may have ended halfway.
        """
        try:
            send_message(self.connection, header, arrays)
            while "version" not in (reply := receive_header(self.connection)):
                if "fails" in reply:
                    failure = reply["fails"]
                    raise RuntimeError(f"the server of the shared parameters failed:\n{failure}")
            new = [receive_arrays(self.connection, leaves) for leaves in (like.params, like.outer)]
        except TimeoutError:
            self.connection.close()
            raise RuntimeError(
                f"rank {self.group.rank} has received nothing for {self.group.journal.stall_s:g} s "
                "from the server of the shared parameters, a process on rank 0's host: check this "
                "host and the network."
            ) from None
        except OSError as error:
            self.connection.close()
            raise RuntimeError(
                "the server of the shared parameters, a process on rank 0's host, has ended "
                f"({error}): restart from a checkpoint."
            ) from None
        return SharedParams(reply["version"], *new)


def join_server(
    rule: Quorum, outer: optax.GradientTransformation, island: Island, state: TrainState
) -> Client:
    """Starts the server next to rank 0, and connects this island; every rank calls it.

    `state` is this island's first one. When a training resumes, the latest shared parameters of all
    islands win. If the start or a connection fails, it raises RuntimeError on every rank.
    """
    group = island.replica.group
    members = island.members
    newest = _newest(group, state)
    hosts = ["127.0.0.1"] if on_one_host(group) else own_addresses()

    def start() -> Place | None:
        return _start(rule, outer, island, newest, state, hosts) if group.is_main else None

    def connect() -> socket.socket | None:
        return _connect(place, group, island.number) if members.is_main else None

    place = group.broadcast_object(
        verify(group, "server of the shared parameters", start, nothing_to_compare)
    )
    connection = verify(group, "way to the server", connect, nothing_to_compare)
    if connection is not None:
        atexit.register(connection.close)
    return Client(group, members, connection, newest)


def _newest(group: Group, state: TrainState) -> SharedParams:
    """Finds the latest shared parameters of all islands, and the outer state of the same island."""
    versions = group.all_gather(np.int64(version_of(state)))
    newest = copy_leaves(state.opt_state.shared), copy_leaves(state.opt_state.outer)
    if versions.any():  # all islands of a new training have equal parameters
        newest = group.broadcast(newest, root=int(np.argmax(versions)))
    return SharedParams(int(versions.max()), *newest)


def _start(
    rule: Quorum,
    outer: optax.GradientTransformation,
    island: Island,
    shared: SharedParams,
    state: TrainState,
    hosts: list[str],
) -> Place:
    """Starts the server in a process on this host."""
    tree = jax.tree.structure(state.opt_state.shared, is_leaf=is_shard)
    params = tree.unflatten(shared.params)
    programs = merging_of(outer, rule.discount, params)
    add, step = (packed(f, *forms) for f, forms in zip(programs, merge_forms(shared)))
    token = new_secret()
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    bind = hosts[0] if hosts == ["127.0.0.1"] else ""
    islands = island.replica.group.processes // island.members.processes
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
        raise RuntimeError("the server of the shared parameters did not start: see its output.")
    return Place(hosts, int(port), token)


def _connect(place: Place, group: Group, island: int) -> socket.socket:
    """Connects this island to the first address of the server that responds."""
    failures = []
    for host in place.addresses:
        try:
            connection = socket.create_connection((host, place.port), CONNECT_S)
            challenge = receive_header(connection)["challenge"]
        except (OSError, KeyError) as error:
            failures.append(f"{host}:{place.port}: {getattr(error, 'strerror', None) or error}")
            continue
        limit = group.journal.stall_s
        connection.settimeout(limit if isfinite(limit) else None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_message(connection, {"proof": signature(place.token, challenge), "island": island})
        return connection
    raise RuntimeError(
        "the server of the shared parameters, on rank 0's host, cannot be reached: "
        f"{'; '.join(failures)}."
    )
