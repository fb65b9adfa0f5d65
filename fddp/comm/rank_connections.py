"""Connections between the processes of a group, one for each pair, from proven ranks only."""

import socket
import threading
import time
from queue import Empty, SimpleQueue

import numpy as np

from fddp.comm.secret import new_secret, signature, signed
from fddp.comm.transport import Hosts

CONNECT_S = 20.0
PROOF_S = 5.0
ADDRESS_BYTES = 300  # of a host's name and a port
RANK_BYTES = 10
SECRET_BYTES, PROOF_BYTES = len(new_secret()), len(signature())

# (rank, connection) of ranks that have called
Called = SimpleQueue[tuple[int, socket.socket]]


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
        called = Called()
        threading.Thread(target=_answer, args=(door, rank, called), daemon=True).start()
        try:
            for other in range(rank):
                name, port = addresses[other].tobytes().decode().split()
                connections[other] = _call(name, int(port), rank, other)
            while len(connections) < len(hosts.ranks) - 1:
                other, connection = called.get(timeout=max(end - time.monotonic(), 0))
                connections[other] = connection
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
            door.shutdown(socket.SHUT_RDWR)  # ends the thread
    return connections


def _call(name: str, port: int, rank: int, other: int) -> socket.socket:
    """Connects to another rank; each proves to the other that it knows the job's secret."""
    connection = socket.create_connection((name, port), CONNECT_S)
    try:
        challenge, answer = _read(connection, SECRET_BYTES), new_secret()
        number = str(rank).rjust(RANK_BYTES)
        proof = signature("lane", challenge, answer, number)
        connection.sendall(f"{answer}{number}{proof}".encode())
        if not signed(_read(connection, PROOF_BYTES), "lane", answer, challenge, str(other)):
            raise ConnectionError("the process there is not of this job")
    except BaseException:
        connection.close()
        raise
    return connection


def _answer(door: socket.socket, rank: int, called: Called) -> None:
    while True:
        try:
            connection, _ = door.accept()
        except OSError:  # the door is closed
            return
        threading.Thread(target=_admit, args=(connection, rank, called), daemon=True).start()


def _admit(connection: socket.socket, rank: int, called: Called) -> None:
    """Takes a call of another rank; a stranger is dropped."""
    try:
        connection.settimeout(PROOF_S)
        challenge = new_secret()
        connection.sendall(challenge.encode())
        answer, number = _read(connection, SECRET_BYTES), _read(connection, RANK_BYTES)
        if not signed(_read(connection, PROOF_BYTES), "lane", challenge, answer, number):
            raise ConnectionError
        connection.sendall(signature("lane", answer, challenge, str(rank)).encode())
        called.put((int(number), connection))
    except (OSError, ValueError):
        connection.close()


def _read(connection: socket.socket, count: int) -> str:
    """Reads so many characters, and nothing behind them."""
    text = b""
    while len(text) < count:
        piece = connection.recv(count - len(text))
        if not piece:
            raise ConnectionError("the process there has closed the connection")
        text += piece
    return text.decode(errors="replace")
