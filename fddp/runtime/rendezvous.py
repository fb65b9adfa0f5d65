"""A rendezvous of all ranks before JAX's coordination service starts.

JAX's service would wait for minutes without a report of the missing ranks. Here rank 0 listens at
the coordinator's port until every other rank has called, then leaves the port to JAX's service. So
rank 0 can report the missing ranks while it waits, and every other rank why it cannot reach rank 0.
"""

import os
import re
import socket
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty
from typing import NamedTuple

from fddp.comm import calls_at, host_key, introduce, receive, reports, send, signature
from fddp.runtime.place import is_of_this_host, place_of
from fddp.runtime.watching import allow_files, wait_readable
from fddp.wording import printable

TELL_S = 10.0  # seconds for which a rank that cannot join reports that to the other ranks
ANOTHER = "set another port on all ranks: FDDP_COORDINATOR=host:port"
LOOK_S = 0.1
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CALL = re.compile(r"rank (\d{1,9}) of (\d{1,9}) on (\w+)(?:: (.+))?")
TOPIC = "rendezvous "  # of the handshakes of a job's ranks
GO = "go "
STOP = "stop: "
FIRST_WORD_S = 5.0
NEXT_WORD_S = 30.0
RETRY_S = 0.2
ATTEMPT_S = 5.0
STRANGE = "the process at this address is not rank 0 of this job, or its FDDP_SECRET differs"


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


def meet_ranks(
    rank: int,
    size: int,
    coordinator: str,
    timeout_s: float,
    problem: str = "",
    job: str = "",
    origin: str = "",
) -> ServiceAddresses:
    """Waits until all ranks have reached rank 0; returns the addresses of JAX's service."""
    # A rank with a `problem` reports it: all ranks raise the same error, and none waits. `job`
    # distinguishes jobs that use one port. `origin` says where this process read its rank.
    place = place_of(coordinator)
    end = time.monotonic() + timeout_s
    if problem:
        end = min(end, time.monotonic() + TELL_S)
    reporting = partial(reports, first_s=FIRST_WORD_S, next_s=NEXT_WORD_S)
    meeting = ServiceAddresses(coordinator, "")
    whence = origin and f" ({origin})"
    if rank:
        reason = ["no answer yet"]  # the latest, for the reporting thread
        with reporting(
            lambda: f"rank {rank} of {size} waits for rank 0 at {coordinator}: {reason[0]}{whence}"
        ):
            answer, host = _call(f"rank {rank} of {size}", place, end, reason, problem, job)
        if answer.startswith(GO):
            loopback, _, first_host = answer.removeprefix(GO).partition(" ")
            if loopback or not reachable(host):  # this rank is on the host of rank 0
                host = first_host
            meeting = ServiceAddresses(loopback or coordinator, "", host)
    else:
        guests: Guests = {}
        if not is_of_this_host(place[0]):  # or of a service in front of it
            coordinator += " (not an address of this host)"
        with reporting(
            lambda: f"rank 0 waits at {coordinator}: {missing_ranks(guests, size)}{whence}"
        ):
            answer, meeting = receive_ranks(guests, size, place, end, problem, job)
    if not answer.startswith(GO):
        raise RuntimeError(
            f"fddp.init(timeout_s={timeout_s:g}) could not join the other ranks at {coordinator}: "
            f"{answer}{whence * (' in time' in answer)}."
        )
    return meeting


### The other ranks


def _call(
    name: str, place: tuple[str, int], end: float, reason: list[str], problem: str, job: str
) -> tuple[str, str]:
    """Calls rank 0 until it answers; returns its answer, or an error, and this host's address."""
    words = f"{name} on {own_host()}{problem and f': {problem}'}"
    while (seconds := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, min(seconds, ATTEMPT_S)) as link:
                host = link.getsockname()[0]
                answer = _answer(link, words, end, reason, job)
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            reason[0] = _reason(error, place)
        else:
            if answer.startswith((GO, STOP)):
                return printable(answer.removeprefix(STOP)), host
        time.sleep(RETRY_S)
    if problem:
        return f"{name.partition(' of ')[0]}: {problem}", ""
    return f"{name} has not reached rank 0 in time: {reason[0]}", ""


def _answer(link: socket.socket, words: str, end: float, reason: list[str], job: str) -> str:
    """Calls once; returns rank 0's answer, or '' without one, with `reason` set."""
    try:
        introduce(link, TOPIC + job, words, min(end, time.monotonic() + ATTEMPT_S))
    except OSError:  # also of a server that waits for a request
        reason[0] = STRANGE
        return ""
    reason[0] = "it is reachable, and waits for other ranks"
    try:
        return receive(link, end + ATTEMPT_S)  # rank 0 started first, so its time is over first
    except OSError:
        reason[0] = "it was reachable and has left"
        return ""


def _reason(error: Exception, place: tuple[str, int]) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"the name {place[0]!r} does not resolve"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, no process listens there yet"
    return (getattr(error, "strerror", None) or str(error)).lower()  # no route to host; timed out


### Rank 0


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
    finally:  # also after an error or an interrupt here: no guest waits on
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
    with calls_at(door, TOPIC + job, "") as called:
        while len(guests) < size - 1:
            if time.monotonic() > end:
                return problem or f"{missing_ranks(guests, size)} in time"
            for link in wait_readable(guests, 0):  # closed: a guest sends nothing more
                del guests[link]
                link.close()
            with suppress(Empty):
                words, link = called.get(timeout=LOOK_S)
                refusal = _admit(guests, size, words, link)
                if refusal and not problem:
                    problem = refusal
                    # Ranks that call later must receive the problem too.
                    end = min(end, time.monotonic() + TELL_S)
    return problem


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


def own_host() -> str:
    return signature(host_key())[:16]
