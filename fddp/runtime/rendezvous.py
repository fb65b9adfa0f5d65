"""Lets ranks meet before JAX's coordination service starts, which for minutes says neither who is missing nor why.

Rank 0 listens at the coordinator's port until every other rank has called; then it gives the port to JAX's service. So
rank 0 knows which ranks have not come, every other rank knows why it cannot reach rank 0, and both say so while they
wait.
"""

import os
import re
import selectors
import socket
import time
from contextlib import closing
from functools import partial
from urllib.parse import quote

from fddp.comm import reports

FIRST_WORD_S = 5.0
NEXT_WORD_S = 30.0
RETRY_S = 0.2
ATTEMPT_S = 5.0
TELL_S = 10.0  # so long a rank that cannot join tells the others so
ANOTHER = "name another port on all ranks: FDDP_COORDINATOR=host:port"
HEARD = 1024  # bytes of a call
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GO = b"go\n"
STOP = b"stop: "
OTHER = b"another job\n"


def meet(rank: int, size: int, coordinator: str, timeout_s: float, problem: str = "", job: str = "") -> None:
    """Waits until all ranks have reached rank 0, and says on stderr whom it waits for and why.

    A rank that cannot join tells the others, so that nobody waits for it in vain and all raise the same error.

    Args:
      rank: this process.
      size: number of processes.
      coordinator: host:port at which rank 0 can be met.
      timeout_s: seconds to wait.
      problem: why this rank cannot join the others; '': it can.
      job: what tells this job from others that may come to the same port; '': nobody knows.

    Raises:
      RuntimeError: not all have come in time, or the processes do not belong together, or one of them cannot join.
    """
    host, port = coordinator.rsplit(":", 1)
    place = (host.strip("[]"), int(port))
    seconds = min(timeout_s, TELL_S) if problem else timeout_s
    end = time.monotonic() + seconds
    job = quote(job)[: HEARD // 4]
    why = ["no answer yet"]  # the latest, for the thread that reports
    says = partial(reports, first_s=FIRST_WORD_S, next_s=NEXT_WORD_S)
    if rank:
        with says(lambda: f"rank {rank} of {size} waits for rank 0 at {coordinator}: {why[0]}"):
            found = _call(rank, size, place, seconds, why, problem, job)
    else:
        came: Guests = {}
        with says(lambda: f"rank 0 waits at {coordinator}: {_missing(came, size) or why[0]}"):
            found = _receive(came, size, place, end, why, problem, job)
    if found:
        raise RuntimeError(f"fddp.init(timeout_s={timeout_s:g}) could not join the others at {coordinator}: {found}.")


### Rank 0

Guests = dict[socket.socket, int]
"""The ranks that have come, by the connections that they hold."""


def _receive(
    came: Guests, size: int, place: tuple[str, int], end: float, why: list[str], own: str, job: str
) -> str | None:
    """Lets the others in until all have come; then tells each to go, or what is wrong."""
    try:
        found = _open(came, size, place, end, job)
        problem = f"rank 0: {own}" if own else found or _resolve(place, end, why)
        for guest in came:
            _tell(guest, STOP + f"{problem}\n".encode() if problem else GO)
        return problem
    finally:
        for guest in came:
            guest.close()


def _open(came: Guests, size: int, place: tuple[str, int], end: float, job: str) -> str | None:
    try:
        door = _listen(*place)
    except OSError as error:
        return f"rank 0 cannot listen there ({os.strerror(error.errno or 0)}); {ANOTHER}"
    problem: str | None = None
    callers = set[socket.socket]()  # those that have not said anything yet
    with closing(door), selectors.DefaultSelector() as watch:
        watch.register(door, selectors.EVENT_READ)
        while len(came) < size - 1:
            left = end - time.monotonic()
            if left <= 0:
                problem = problem or f"{_missing(came, size)} in time"
                break
            for key, _ in watch.select(left):
                if key.fileobj is door:
                    caller, _ = door.accept()
                    callers.add(caller)
                    watch.register(caller, selectors.EVENT_READ)
                elif isinstance(caller := key.fileobj, socket.socket):
                    found = _hear(caller, came, size, job)
                    if found and not problem:
                        problem = found
                        end = min(end, time.monotonic() + TELL_S)  # ranks that come later are to hear of it too
                    callers.discard(caller)
                    if caller not in came:
                        watch.unregister(caller)
                        caller.close()
        for caller in callers:
            caller.close()
    return problem


def _hear(caller: socket.socket, came: Guests, size: int, job: str) -> str | None:
    """Notes the rank that has called; returns what is wrong. A rank calls once: if it is heard again, it has left.

    A stranger is no problem.
    """
    came.pop(caller, None)
    try:
        called = re.fullmatch(rb"fddp: rank (\d+) of (\d+)(?: in job (\S+))?(?:: (.+))?\n", caller.recv(HEARD))
    except OSError:
        called = None
    if called is None:
        return None
    if (called[3] or b"").decode(errors="replace") != job:
        _tell(caller, OTHER)
        return None
    rank = int(called[1])
    its_size = int(called[2])
    double = rank in came.values()
    came[caller] = rank
    if its_size != size:
        return f"rank 0 says that there are {size} processes, rank {rank} that there are {its_size}"
    if double:
        return f"two processes say that they are rank {rank}"
    return f"rank {rank}: {called[4].decode(errors='replace')}" if called[4] else None


def _missing(came: Guests, size: int) -> str:
    ranks = [str(rank) for rank in range(1, size) if rank not in came.values()]
    shown = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    several = "s" if len(ranks) > 1 else ""
    return f"rank{several} {shown} of {size} ha{'ve' if several else 's'} not come" if ranks else ""


def bind_address(coordinator: str) -> str | None:
    """The address at which rank 0 listens where host:port means its own host alone; None: at all its devices."""
    return coordinator if coordinator.rsplit(":", 1)[0].strip("[]") in LOOPBACK else None


def _listen(host: str, port: int) -> socket.socket:
    if host in LOOPBACK:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except (OSError, ValueError):  # a host without IPv6
        return socket.create_server(("", port), backlog=1024)


def _resolve(place: tuple[str, int], end: float, why: list[str]) -> str | None:
    """Waits until the coordinator's name resolves, by which rank 0's own client, too, meets its service."""
    while True:
        try:
            socket.getaddrinfo(*place)
            return None
        except OSError as error:
            why[0] = _reason(error, place)
        if time.monotonic() > end:
            return why[0]
        time.sleep(RETRY_S)


def _tell(guest: socket.socket, message: bytes) -> None:
    try:
        guest.sendall(message)
    except OSError:  # it has just left, and JAX's service will find out
        return


### The other ranks


def _call(
    rank: int, size: int, place: tuple[str, int], timeout_s: float, why: list[str], problem: str, job: str
) -> str | None:
    """Calls rank 0 until it answers; returns what is wrong, or None."""
    end = time.monotonic() + timeout_s
    called = f"fddp: rank {rank} of {size}{job and f' in job {job}'}{problem and f': {problem}'}\n".encode()
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, min(left, ATTEMPT_S)) as door:
                door.sendall(called)
                why[0] = "it is there, and waits for others"
                # Rank 0 was there first, so its time is over first.
                door.settimeout(timeout_s + ATTEMPT_S)
                answer = door.makefile("rb").readline(4096)
        except OSError as error:
            why[0] = _reason(error, place)
        else:
            if answer == GO:
                return None
            if answer.startswith(STOP):
                return answer.removeprefix(STOP).decode().strip()
            why[0] = "what answers there is not rank 0 of this job" if answer else "it was there and has left"
        time.sleep(RETRY_S)
    return f"rank {rank}: {problem}" if problem else f"rank {rank} of {size} has not reached rank 0 in time: {why[0]}"


def _reason(error: OSError, place: tuple[str, int]) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {place[0]!r} does not resolve"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nobody listens there yet"
    return (error.strerror or str(error)).lower()  # no route to host; timed out
