"""The addresses of a job's members, in a file for processes that start later.

`python -m fddp run --elastic` names the folder. Without it a process connects to rank 0.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from fddp.elastic.connections import CONNECT_S, RETRY_S, Links
from fddp.elastic.views import Member, View
from fddp.runtime import FINISHED, FOLDER, LOST, MEMBERS, place_of


def known_addresses(coordinator: str | None) -> list[str]:
    """The addresses of members as they have written them, and that of rank 0."""
    path = _file()
    members = json.loads(path.read_text()) if path and path.exists() else []
    addresses = [address for _, _, address in members]
    return [*addresses, coordinator] if coordinator else addresses


def request_entry(door: Links, member: Member, coordinator: str | None, deadline: float) -> None:
    """Connects to a member and requests entry into its job; TimeoutError if none answers."""
    while True:
        addresses = known_addresses(coordinator)
        for address in addresses:
            with suppress(ConnectionError):
                door.connect(address).send({"join": member})
                return
        end_with_job()
        if time.monotonic() > deadline:
            places = ", ".join(addresses) or "any address"
            raise TimeoutError(f"no rank of this job answers at {places}")
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
        socket.create_connection(place_of(coordinator), CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass  # its host is silent
    return True


def own_host(coordinator: str | None) -> str:
    """The address of this host by which it reaches the members."""
    for address in known_addresses(coordinator):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(place_of(address))
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
