"""JAX's world of a view: its processes meet once, and are then independent of any coordinator.

JAX's processes need a coordination service to exchange devices and the addresses of Gloo, and end
when it does. So the members of a view start one, meet there, open all connections by a first
message, and leave it. The death of any member, or of all but one, then breaks messages off with an
error that can be caught.
"""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.extend.backend
import numpy as np

from fddp.comm import REPLICATED, Group, Journal, forget_device_caches, world_group
from fddp.elastic.views import View
from fddp.jax_internals import bind_gloo, connect_to_service, leave_service
from fddp.runtime import all_devices, place_of, start_service, without_proxies

MEET_S = 20


def start_meeting(host: str, view: View) -> str:
    """Starts the service at which the members of a view meet; returns its host:port."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        address = f"{host}:{probe.getsockname()[1]}"
    os.close(start_service("serve_briefly", address, len(view.members)))
    return address


class JaxWorld(NamedTuple):
    """The joined processes of a view."""

    group: Group
    connections: frozenset[str]
    """Names of this process's connections for messages, as in /proc/self/fd."""

    def break_off(self) -> None:
        """Closes these connections: messages under way end with an error."""
        for connection, name in _connections():
            with connection, suppress(OSError):
                if name in self.connections:
                    connection.shutdown(socket.SHUT_RDWR)


def form_world(view: View, rank: int, journal: Journal) -> JaxWorld:
    """Joins the other members of a view; JaxRuntimeError if one does not come, or ends."""
    before = {name for connection, name in _connections() if connection.close() is None}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    bind_gloo(place_of(view.members[rank].address)[0])
    with without_proxies():
        connect_to_service(view.service, rank, len(view.members), MEET_S)
    journal.broken = False  # new communicators have no messages of the lost step
    group = replace(world_group(all_devices("gloo")), backend="gloo", journal=journal)
    group.barrier()
    # Gloo connects at the first message of each communicator, and a lane when it is made.
    payload = group.placement.place(np.zeros(1, np.float32), REPLICATED)
    add = group.placement.program(group.communicator.all_reduce, (REPLICATED,), REPLICATED)
    jax.block_until_ready(add(payload))
    if group.transport.in_lanes:
        group.transport.in_lanes(1, group.journal)
    leave_service()
    of_members = {place_of(member.address)[1] for member in view.members}
    opened = [
        name
        for connection, name in _connections()
        if name not in before and not _ends(connection) & of_members
    ]
    return JaxWorld(group, frozenset(opened))


def forget_devices() -> None:
    """Forgets the devices of a world; all arrays and programs on them become invalid."""
    forget_device_caches()
    jax.clear_caches()
    jax.extend.backend.clear_backends()
    gc.collect()  # cycles of groups and steps hold XLA's client and its threads


def _connections() -> Iterator[tuple[socket.socket, str]]:
    """Yields a duplicate of each TCP connection of this process, to close, and its name."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = str(file.readlink())
            if not name.startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(file.name)))
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                yield connection, name
            else:  # Gloo ends the process if its listener is closed
                connection.close()


def _ends(connection: socket.socket) -> set[int]:
    """The ports of a connection; closes the duplicate."""
    with connection, suppress(OSError):
        return {connection.getsockname()[1], connection.getpeername()[1]}
    return set()
