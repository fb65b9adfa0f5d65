"""Connections between the processes of a group outside of its collectives, and their addresses."""

import socket
import struct
import time
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING

import numpy as np

from fddp.comm.handshake import call, calls_at
from fddp.comm.transport import Hosts

if TYPE_CHECKING:  # a group has hosts
    from fddp.comm.group import Group


CONNECT_S = 20.0
ADDRESS_BYTES = 300  # of a host's name and a port
SIOCGIFADDR = 0x8915


def connect_ranks(rank: int, hosts: Hosts, host: str) -> dict[int, socket.socket]:
    """Connects each pair of processes of a group, which listen at their `host`; collective."""
    family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    connections = dict[int, socket.socket]()
    door = socket.create_server(place[:2], family=family, backlog=len(hosts.ranks))
    address = f"{place[0]} {door.getsockname()[1]}".encode().ljust(ADDRESS_BYTES)
    addresses = hosts.all_gather(np.frombuffer(address, np.uint8))
    end = time.monotonic() + CONNECT_S
    with calls_at(door, "lane", str(rank)) as called:
        try:
            for other in range(rank):
                name, port = addresses[other].tobytes().decode().split()
                connections[other] = _call((name, int(port)), rank, other, end)
            while len(connections) < len(hosts.ranks) - 1:
                other, connection = called.get(timeout=max(end - time.monotonic(), 0))
                connections[int(other)] = connection
        except (OSError, Empty) as error:
            for connection in connections.values():
                connection.close()
            missing = [hosts.ranks[k] for k in range(len(hosts.ranks)) if k not in connections]
            missing.remove(hosts.ranks[rank])
            raise ConnectionError(
                f"Gloo's ranks {missing} do not connect to rank {hosts.ranks[rank]} at {host}: "
                f"{error or 'no call in time'}."
            ) from error
    return connections


def _call(address: tuple[str, int], rank: int, other: int, end: float) -> socket.socket:
    number, connection = call(address, "lane", str(rank), max(end - time.monotonic(), 0.1))
    if number != str(other):
        connection.close()
        raise ConnectionError(f"the process there is rank {number}")
    return connection


### Addresses


def host_keys(group: "Group") -> list[bytes]:
    """Returns `host_key` of each process; every process calls it."""
    keys = group.hosts.all_gather(np.frombuffer(host_key().encode()[:80].ljust(80), np.uint8))
    return [key.tobytes() for key in keys]


def own_addresses() -> list[str]:
    """Returns this host's IPv4 addresses except loopback, or its name if it has none."""
    import fcntl  # POSIX only

    addresses = list[str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
                addresses.append(socket.inet_ntoa(answer[20:24]))
            except OSError:
                continue
    return [address for address in addresses if not address.startswith("127.")] or [
        socket.gethostname()
    ]


def host_key() -> str:
    """Returns a key of kernel and network namespace, equal if processes share a loopback device."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(
            Path("/proc/self/ns/net").readlink()
        )
    except OSError:
        return socket.gethostname()
