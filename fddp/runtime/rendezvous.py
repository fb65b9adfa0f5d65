"""A rendezvous of all ranks before JAX's coordination service starts.

JAX's service would wait for minutes without a report of the missing ranks. Here rank 0 listens at
the coordinator's port until every other rank has called, then leaves the port to JAX's service. So
rank 0 can report the missing ranks while it waits, and every other rank why it cannot reach rank 0.
"""

import socket
import time
from functools import partial

from fddp.comm import introduce, receive, reports
from fddp.runtime.place import is_of_this_host, place_of
from fddp.runtime.reception import (
    GO,
    STOP,
    TELL_S,
    Guests,
    ServiceAddresses,
    missing_ranks,
    own_host,
    reachable,
    receive_ranks,
    topic_of,
)
from fddp.wording import printable

FIRST_WORD_S = 5.0
NEXT_WORD_S = 30.0
RETRY_S = 0.2
ATTEMPT_S = 5.0
STRANGE = "the process at this address is not rank 0 of this job, or its FDDP_SECRET differs"


def meet_ranks(
    rank: int,
    size: int,
    coordinator: str,
    timeout_s: float,
    problem: str = "",
    job: str = "",
    origin: str = "",
) -> ServiceAddresses:
    """Waits until all ranks have reached rank 0; returns the addresses of JAX's service.

    Rank 0 and every other rank prove to each other that they know the job's secret. A rank that
    cannot join, because of `problem`, reports that: no rank waits for it, and all raise the same
    error. `job` distinguishes jobs that use the same port; it may be ''. `origin` says where this
    process read its rank.
    """
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
        introduce(link, topic_of(job), words, min(end, time.monotonic() + ATTEMPT_S))
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
