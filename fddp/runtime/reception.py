"""Rank 0's side of the rendezvous: it accepts the calls of all other ranks."""

import os
import re
import selectors
import socket
import time
from contextlib import closing
from itertools import islice
from typing import NamedTuple

from fddp.comm import host_key, new_secret, signature, signed
from fddp.runtime.watching import allow_files
from fddp.wording import printable

TELL_S = 10.0  # seconds for which a rank that cannot join reports that to the other ranks
ANOTHER = "set another port on all ranks: FDDP_COORDINATOR=host:port"
MOST = 4096  # bytes of a line
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CALL = re.compile(r"fddp: (\w+) (\w+) (rank (\d{1,9}) of (\d{1,9}) on (\w+)(?:: (.+))?)\n")
GO = "go "
STOP = "stop: "
OTHER = "another job\n"


class ServiceAddresses(NamedTuple):
    """The addresses of JAX's service, once all ranks have met."""

    coordinator: str
    """host:port for this rank to connect to."""
    bind: str
    """host:port for rank 0 to listen at: loopback if all ranks are on one host."""
    host: str = ""
    """Address of this rank's host for the other ranks; empty if it is unknown."""


class Guest(NamedTuple):
    """A connected rank."""

    rank: int
    host: str
    address: str
    """Address of rank 0 on this connection."""
    challenges: tuple[str, str]
    """Challenges of rank 0 and of the guest, which sign the call and the answer."""


Guests = dict[socket.socket, Guest]
"""Connection → connected rank."""


def receive(
    guests: Guests, size: int, place: tuple[str, int], end: float, refusal: str, job: str
) -> tuple[str, ServiceAddresses]:
    """Accepts all ranks, then sends each the address of JAX's service or the problem."""
    try:
        problem = _open(guests, size, place, end, job)
        guest_address, meeting = _places(guests, place[1])
        answer = f"{GO}{guest_address} {meeting.host}"
        if refusal:
            problem = f"rank 0: {refusal}"
        if problem:
            answer = f"{STOP}{problem}"
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
    callers = dict[socket.socket, str]()  # silent connections, and their challenges
    with closing(door), selectors.DefaultSelector() as watch:
        watch.register(door, selectors.EVENT_READ)

        def drop(caller: socket.socket) -> None:
            watch.unregister(caller)
            callers.pop(caller, None)
            caller.close()

        while len(guests) < size - 1:
            seconds = end - time.monotonic()
            if seconds <= 0:
                problem = problem or f"{missing_ranks(guests, size)} in time"
                break
            for caller in [key.fileobj for key, _ in watch.select(seconds)]:
                if caller is door:
                    try:
                        caller, _ = door.accept()
                    except OSError as error:  # the limit of open files
                        if not callers:
                            return (
                                f"rank 0 cannot accept more ranks ({error.strerror}): "
                                "raise `ulimit -n`"
                            )
                        drop(next(iter(callers)))  # a dropped rank calls again
                        continue
                    callers[caller] = new_secret()
                    watch.register(caller, selectors.EVENT_READ)
                    _send(caller, f"fddp: {callers[caller]}\n")
                elif isinstance(caller, socket.socket) and caller.fileno() >= 0:  # not dropped
                    refusal = _read_call(caller, callers.pop(caller, ""), guests, size, job)
                    if refusal and not problem:
                        problem = refusal
                        # Ranks that call later must receive the problem too.
                        end = min(end, time.monotonic() + TELL_S)
                    if caller not in guests:
                        drop(caller)
        for caller in callers:
            caller.close()
    return problem


def _read_call(
    caller: socket.socket, challenge: str, guests: Guests, size: int, job: str
) -> str | None:
    """Reads a call and adds its rank to `guests`; returns the problem, if any.

    A rank calls once. Further input on its connection means that it left. A stranger is no problem.
    """
    guests.pop(caller, None)
    try:
        call = CALL.fullmatch(caller.recv(MOST).decode(errors="replace"))
    except OSError:
        call = None
    if call is None:
        return None
    if not signed(call[1], job, challenge, call[2], call[3]):
        _send(caller, OTHER)
        return None
    rank = int(call[4])
    guest_size = int(call[5])
    if not 1 <= rank < max(size, guest_size):
        return None
    duplicate = rank in [guest.rank for guest in guests.values()]
    guests[caller] = Guest(rank, call[6], caller.getsockname()[0], (challenge, call[2]))
    if guest_size != size:
        return (
            f"rank 0 says that there are {size} processes, rank {rank} that there are {guest_size}"
        )
    if duplicate:
        return f"two processes claim to be rank {rank}"
    if call[7]:
        return f"rank {rank}: {printable(call[7])}"
    return None


def missing_ranks(guests: Guests, size: int) -> str:
    """Lists the ranks that have not called yet; empty if all have."""
    present = {guest.rank for guest in list(guests.values()) if guest.rank < size}
    count = size - 1 - len(present)
    first = islice((rank for rank in range(1, size) if rank not in present), 8)
    ranks = ", ".join(map(str, first))
    if count > 8:
        ranks += f" and {count - 8} more"
    if count > 1:
        return f"ranks {ranks} of {size} have not come"
    if count == 1:
        return f"rank {ranks} of {size} has not come"
    return ""


def _places(guests: Guests, port: int) -> tuple[str, ServiceAddresses]:
    """Returns the guests' address of JAX's service, '' for the coordinator's, and rank 0's."""
    loopback = f"127.0.0.1:{port}"
    if {guest.host for guest in guests.values()} <= {own_host()}:
        return loopback, ServiceAddresses(loopback, loopback, "127.0.0.1")
    addresses = {guest.address.removeprefix("::ffff:") for guest in guests.values()}
    host = next(filter(reachable, sorted(addresses)), "")
    if len(addresses) > 1 or "%" in (address := addresses.pop()):  # link-local
        return "", ServiceAddresses(loopback, f"[::]:{port}", host)
    # Rank 0 does not resolve its name: that may give another of its addresses.
    if ":" in address:
        address = f"[{address}]"
    return "", ServiceAddresses(f"{address}:{port}", f"{address}:{port}", host)


def reachable(address: str) -> bool:
    """False for addresses that no other host reaches: loopback and link-local ones."""
    return not (address.startswith("127.") or address == "::1" or "%" in address)


def _listen(host: str, port: int) -> socket.socket:
    if host in LOOPBACK:
        family = socket.AF_INET
        if ":" in host:
            family = socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=1024)
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    except (OSError, ValueError):  # a host without IPv6
        return socket.create_server(("", port), backlog=1024)


def _send(guest: socket.socket, message: str) -> None:
    try:
        guest.sendall(message.encode())
    except OSError:  # the guest has just left, and JAX's service will notice
        return


def own_host() -> str:
    return signature(host_key())[:16]
