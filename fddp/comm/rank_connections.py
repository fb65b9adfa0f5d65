"""Connections between the processes of a group, one for each pair, from proven ranks only."""

import socket
import time
from queue import Empty, SimpleQueue

import numpy as np

from fddp.comm.handshake import answer_calls, call, shut
from fddp.comm.transport import Hosts

CONNECT_S = 20.0
ADDRESS_BYTES = 300  # of a host's name and a port


def connect_ranks(rank: int, hosts: Hosts, host: str) -> dict[int, socket.socket]:
    """Connects all processes of a group, each of which listens at its `host`; collective.

    Raises:
      ConnectionError: a rank does not answer in time.
    """
    family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    connections = dict[int, socket.socket]()
    with socket.create_server(place[:2], family=family, backlog=len(hosts.ranks)) as door:
        address = f"{place[0]} {door.getsockname()[1]}".encode().ljust(ADDRESS_BYTES)
        addresses = hosts.all_gather(np.frombuffer(address, np.uint8))
        end = time.monotonic() + CONNECT_S
        called = SimpleQueue[tuple[str, socket.socket]]()
        answering = answer_calls(door, "lane", str(rank), lambda *call: called.put(call))
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
        finally:
            shut(door, answering)
    return connections


def _call(address: tuple[str, int], rank: int, other: int, end: float) -> socket.socket:
    number, connection = call(address, "lane", str(rank), max(end - time.monotonic(), 0.1))
    if number != str(other):
        connection.close()
        raise ConnectionError(f"the process there is rank {number}")
    return connection
