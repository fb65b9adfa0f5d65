"""Rank 0 lets the other ranks in, at the coordinator's port, until JAX's service takes it."""

import os
import re
import selectors
import socket
import time
from contextlib import closing
from itertools import islice
from typing import NamedTuple

from fddp.comm import host_key, new_secret, signature, signed
from fddp.watching import allow_files
from fddp.wording import printable

TELL_S = 10.0  # so long a rank that cannot join tells the others so
ANOTHER = "name another port on all ranks: FDDP_COORDINATOR=host:port"
MOST = 4096  # bytes of a line
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CALL = re.compile(r"fddp: (\w+) (\w+) (rank (\d{1,9}) of (\d{1,9}) on (\w+)(?:: (.+))?)\n")
GO = "go "
STOP = "stop: "
OTHER = "another job\n"


class Meeting(NamedTuple):
    """The place of JAX's service, once all ranks have met."""

    coordinator: str
    """host:port at which this rank reaches it."""
    bind: str
    """host:port at which it listens, on rank 0: loopback where all ranks are on one host."""


class Guest(NamedTuple):
    """A rank that has called."""

    rank: int
    host: str
    address: str
    """The address of rank 0 at which it was reached."""
    challenges: tuple[str, str]
    """Numbers of rank 0 and of the guest, which its call and the answer are signed with."""


Guests = dict[socket.socket, Guest]
"""The ranks that have come, by the connections that they hold."""


def receive(
    guests: Guests, size: int, place: tuple[str, int], end: float, refusal: str, job: str
) -> tuple[str, Meeting]:
    """Lets the other ranks in until all have called; then sends each of them the place, or the problem."""
    try:
        problem = _open(guests, size, place, end, job)
        problem = f"rank 0: {refusal}" if refusal else problem
        theirs, meeting = _places(guests, place[1])
        answer = f"{STOP}{problem}" if problem else f"{GO}{theirs}"
        for guest, (*_, challenges) in guests.items():
            _send(guest, f"{signature(job, *challenges, answer)} {answer}\n")
        return problem or answer, meeting
    finally:
        for guest in guests:
            guest.close()


def _open(guests: Guests, size: int, place: tuple[str, int], end: float, job: str) -> str | None:
    allow_files(size)
    try:
        door = _listen(*place)
    except OSError as error:
        return f"rank 0 cannot listen there ({os.strerror(error.errno or 0)}); {ANOTHER}"
    problem: str | None = None
    callers = dict[socket.socket, str]()  # those that have not said anything yet, and their challenges
    with closing(door), selectors.DefaultSelector() as watch:
        watch.register(door, selectors.EVENT_READ)

        def drop(caller: socket.socket) -> None:
            watch.unregister(caller)
            callers.pop(caller, None)
            caller.close()

        while len(guests) < size - 1:
            left = end - time.monotonic()
            if left <= 0:
                problem = problem or f"{missing(guests, size)} in time"
                break
            for caller in [key.fileobj for key, _ in watch.select(left)]:
                if caller is door:
                    try:
                        caller, _ = door.accept()
                    except OSError as error:  # it may open no more files
                        if not callers:
                            return f"rank 0 can let no more ranks in ({error.strerror}): raise `ulimit -n`"
                        drop(next(iter(callers)))  # a rank calls again
                        continue
                    callers[caller] = new_secret()
                    watch.register(caller, selectors.EVENT_READ)
                    _send(caller, f"fddp: {callers[caller]}\n")
                elif isinstance(caller, socket.socket) and caller.fileno() >= 0:  # not dropped
                    refusal = _read_call(caller, callers.pop(caller, ""), guests, size, job)
                    if refusal and not problem:
                        problem = refusal
                        end = min(end, time.monotonic() + TELL_S)  # ranks that come later are to hear of it too
                    if caller not in guests:
                        drop(caller)
        for caller in callers:
            caller.close()
    return problem


def _read_call(caller: socket.socket, challenge: str, guests: Guests, size: int, job: str) -> str | None:
    """Notes the rank that has called; returns the problem, if any. A rank calls once: a second message means it left.

    A stranger is no problem.
    """
    guests.pop(caller, None)
    try:
        called = CALL.fullmatch(caller.recv(MOST).decode(errors="replace"))
    except OSError:
        called = None
    if called is None:
        return None
    if not signed(called[1], job, challenge, called[2], called[3]):
        _send(caller, OTHER)
        return None
    rank = int(called[4])
    its_size = int(called[5])
    if not 1 <= rank < max(size, its_size):
        return None
    double = rank in [guest.rank for guest in guests.values()]
    guests[caller] = Guest(rank, called[6], caller.getsockname()[0], (challenge, called[2]))
    if its_size != size:
        return f"rank 0 says that there are {size} processes, rank {rank} that there are {its_size}"
    if double:
        return f"two processes say that they are rank {rank}"
    return f"rank {rank}: {printable(called[7])}" if called[7] else None


def missing(guests: Guests, size: int) -> str:
    """Names the ranks that rank 0 still waits for."""
    present = {guest.rank for guest in list(guests.values()) if guest.rank < size}
    count = size - 1 - len(present)
    first = ", ".join(map(str, islice((rank for rank in range(1, size) if rank not in present), 8)))
    more = f" and {count - 8} more" if count > 8 else ""
    several = "s" if count > 1 else ""
    return f"rank{several} {first}{more} of {size} ha{'ve' if several else 's'} not come" if count else ""


def _places(guests: Guests, port: int) -> tuple[str, Meeting]:
    """Where the guests reach JAX's service, '' where they reached rank 0; and its place for rank 0."""
    loopback = f"127.0.0.1:{port}"
    if {guest.host for guest in guests.values()} <= {own_host()}:
        return loopback, Meeting(loopback, loopback)
    addresses = {guest.address for guest in guests.values()}
    if len(addresses) > 1 or "%" in (address := addresses.pop()):  # the address of a link alone
        return "", Meeting(loopback, f"[::]:{port}")
    # Rank 0 does not look its name up, which may lead to another of its addresses.
    address = address.removeprefix("::ffff:")
    bind = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return "", Meeting(bind, bind)


def _listen(host: str, port: int) -> socket.socket:
    if host in LOOPBACK:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except (OSError, ValueError):  # a host without IPv6
        return socket.create_server(("", port), backlog=1024)


def _send(guest: socket.socket, message: str) -> None:
    try:
        guest.sendall(message.encode())
    except OSError:  # it has just left, and JAX's service will find out
        return


def own_host() -> str:
    return signature(host_key())[:16]
