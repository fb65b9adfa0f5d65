"""The addresses of a job's members, in a file for processes that start later.

`python -m fddp run --elastic` names the folder. Without it a process connects to rank 0.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fddp.elastic.connections import RETRY_S, Links
from fddp.elastic.views import Member, View
from fddp.runtime import FINISHED, FOLDER, LOST, MEMBERS, place_of

CONNECT_S = 2.0

Address = tuple[str, int]


def address_of(coordinator: str | None) -> Address:
    """The address of rank 0 at the start of a job; any port of this host if it is alone."""
    if coordinator is None:
        return "127.0.0.1", 0
    return place_of(coordinator)


def known_addresses(coordinator: str | None) -> list[Address]:
    """The addresses of members as they have written them, and that of rank 0."""
    path = _file()
    members = json.loads(path.read_text()) if path and path.exists() else []
    addresses = [(host, port) for _, _, (host, port) in members]
    return [*addresses, address_of(coordinator)] if coordinator else addresses


def request_entry(door: Links, member: Member, coordinator: str | None, deadline: float) -> None:
    """Connects to a member and requests entry into its job; TimeoutError if none answers."""
    while True:
        addresses = known_addresses(coordinator)
        for address in addresses:
            with suppress(ConnectionError):
                door.connect(address, CONNECT_S).send({"join": member})
                return
        end_with_job()
        if time.monotonic() > deadline:
            places = ", ".join(f"{host}:{port}" for host, port in addresses)
            raise TimeoutError(f"no rank of this job answers at {places or 'any address'}")
        time.sleep(RETRY_S)


def end_with_job() -> None:
    """Ends this script, as one that has succeeded, if a rank has reached the end of the job."""
    path = _file()
    if path and path.with_name(FINISHED).exists():
        print("fddp: the job has reached its end.", file=sys.stderr, flush=True)
        raise SystemExit(0)


def is_founded(coordinator: str | None) -> bool:
    """False if no member of this host has written addresses, and rank 0 does not listen."""
    path = _file()
    if path and path.exists():
        return True
    if coordinator is None:
        return False
    try:
        socket.create_connection(address_of(coordinator), CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # its host is silent
        return True
    return True


def host_towards(addresses: Sequence[Address]) -> str:
    """The address of this host by which it reaches the members."""
    for address in addresses:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    return "127.0.0.1"


def write_members(view: View) -> None:
    """Writes the members' addresses for processes that join later."""
    if path := _file():
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f"{path.name}.{os.getpid()}")
        staging.write_text(json.dumps(view.members))
        staging.replace(path)


def report_lost(uid: str) -> None:
    """Has `python -m fddp run` end a silent process, if it is of this host."""
    if path := _file():
        lost = path.with_name(LOST)
        lost.mkdir(parents=True, exist_ok=True)
        (lost / uid).touch()


def _file() -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder) / MEMBERS if folder else None
