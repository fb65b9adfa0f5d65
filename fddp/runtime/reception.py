"""Rank 0's side of the rendezvous: it accepts the calls of all other ranks."""

import os
import re
import selectors
import socket
import time
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from fddp.comm import answer_calls, host_key, send, shut, signature
from fddp.runtime.watching import allow_files
from fddp.wording import printable

TELL_S = 10.0  # seconds for which a rank that cannot join reports that to the other ranks
ANOTHER = "set another port on all ranks: FDDP_COORDINATOR=host:port"
LOOK_S = 0.1
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CALL = re.compile(r"rank (\d{1,9}) of (\d{1,9}) on (\w+)(?:: (.+))?")
GO = "go "
STOP = "stop: "


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


Guests = dict[socket.socket, Guest]
"""Connection → connected rank."""


def receive_ranks(
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
        for link in guests:
            with suppress(OSError):  # the guest has just left, and JAX's service will notice
                send(link, answer)
        return problem or answer, meeting
    finally:
        for link in guests:
            link.close()


def _open(guests: Guests, size: int, place: tuple[str, int], end: float, job: str) -> str:
    """Accepts guests until all ranks are present; returns the problem, or ''."""
    allow_files(size)
    try:
        door = _listen(*place)
    except OSError as error:
        return f"rank 0 cannot listen there ({os.strerror(error.errno or 0)}); {ANOTHER}"
    problem = ""
    called = SimpleQueue[tuple[str, socket.socket]]()
    answering = answer_calls(door, topic_of(job), "", lambda *call: called.put(call))
    try:
        while len(guests) < size - 1:
            if time.monotonic() > end:
                return problem or f"{missing_ranks(guests, size)} in time"
            _drop_leavers(guests)
            with suppress(Empty):
                words, link = called.get(timeout=LOOK_S)
                refusal = _admit(guests, size, words, link)
                if refusal and not problem:
                    problem = refusal
                    # Ranks that call later must receive the problem too.
                    end = min(end, time.monotonic() + TELL_S)
    finally:
        shut(door, answering)
    return problem


def _drop_leavers(guests: Guests) -> None:
    """Drops the guests that closed their connection: a guest sends nothing more."""
    with selectors.PollSelector() as watch:
        for link in guests:
            watch.register(link, selectors.EVENT_READ)
        for key, _ in watch.select(0):
            link: Any = key.fileobj
            del guests[link]
            link.close()


def _admit(guests: Guests, size: int, words: str, link: socket.socket) -> str:
    """Adds the rank that has called with these words to `guests`; returns the problem, or ''."""
    call = CALL.fullmatch(words)
    if call is None or not 1 <= int(call[1]) < max(size, int(call[2])):
        link.close()
        return ""
    rank = int(call[1])
    guest_size = int(call[2])
    duplicate = rank in [guest.rank for guest in guests.values()]
    guests[link] = Guest(rank, call[3], link.getsockname()[0])
    if guest_size != size:
        return (
            f"rank 0 says that there are {size} processes, rank {rank} that there are {guest_size}"
        )
    if duplicate:
        return f"two processes claim to be rank {rank}"
    if call[4]:
        return f"rank {rank}: {printable(call[4])}"
    return ""


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


def topic_of(job: str) -> str:
    """The topic of the handshakes of a job's ranks."""
    return f"rendezvous {job}"


def own_host() -> str:
    return signature(host_key())[:16]
