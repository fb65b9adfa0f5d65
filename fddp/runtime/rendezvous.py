"""Lets ranks meet before JAX's coordination service starts, which for minutes says neither who is missing nor why.

Rank 0 listens at the coordinator's port until every other rank has called; then it gives the port to JAX's service. So
rank 0 knows which ranks have not come, every other rank knows why it cannot reach rank 0, and both say so while they
wait.
"""

import re
import socket
import time
from functools import partial

from fddp.comm import new_secret, reports, signature, signed
from fddp.runtime.reception import GO, MOST, STOP, TELL_S, Guests, Meeting, missing, own_host, receive
from fddp.wording import printable

FIRST_WORD_S = 5.0
NEXT_WORD_S = 30.0
RETRY_S = 0.2
ATTEMPT_S = 5.0
GREETING = re.compile(r"fddp: (\w+)\n")
STRANGE = "what answers there is not rank 0 of this job, or its FDDP_SECRET differs"


def meet(rank: int, size: int, coordinator: str, timeout_s: float, problem: str = "", job: str = "") -> Meeting:
    """Waits until all ranks have reached rank 0, and says on stderr whom it waits for and why.

    Rank 0 and the others prove to each other that they know the job's secret. A rank that cannot join reports
    that to the others, so that no rank waits for it in vain and all raise the same error.

    Args:
      rank: this process.
      size: number of processes.
      coordinator: host:port at which rank 0 can be met.
      timeout_s: seconds to wait.
      problem: why this rank cannot join the others; '': it can.
      job: what tells this job from others that may come to the same port; '': nobody knows.

    Returns:
      The place of JAX's service.

    Raises:
      RuntimeError: not all have come in time, or the processes do not belong together, or one of them cannot join.
    """
    host, port = coordinator.rsplit(":", 1)
    place = (host.strip("[]"), int(port))
    seconds = min(timeout_s, TELL_S) if problem else timeout_s
    end = time.monotonic() + seconds
    says = partial(reports, first_s=FIRST_WORD_S, next_s=NEXT_WORD_S)
    meeting = Meeting(coordinator, "")
    if rank:
        why = ["no answer yet"]  # the latest, for the thread that reports
        with says(lambda: f"rank {rank} of {size} waits for rank 0 at {coordinator}: {why[0]}"):
            found = _call(f"rank {rank} of {size}", place, end, why, problem, job)
        if found.startswith(GO):
            meeting = Meeting(found.removeprefix(GO) or coordinator, "")
    else:
        guests: Guests = {}
        with says(lambda: f"rank 0 waits at {coordinator}: {missing(guests, size)}"):
            found, meeting = receive(guests, size, place, end, problem, job)
    if not found.startswith(GO):
        raise RuntimeError(f"fddp.init(timeout_s={timeout_s:g}) could not join the others at {coordinator}: {found}.")
    return meeting


### The other ranks


def _call(name: str, place: tuple[str, int], end: float, why: list[str], problem: str, job: str) -> str:
    """Calls rank 0 until it answers; returns its answer, or what is wrong."""
    words = f"{name} on {own_host()}{problem and f': {problem}'}"
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, min(left, ATTEMPT_S)) as door:
                answer = _answer(door, words, end, why, job)
        except (OSError, UnicodeError) as error:  # a name may be none
            why[0] = _reason(error, place)
        else:
            if answer.startswith((GO, STOP)):
                return printable(answer.removeprefix(STOP))
        time.sleep(RETRY_S)
    return f"{name.partition(' of ')[0]}: {problem}" if problem else f"{name} has not reached rank 0 in time: {why[0]}"


def _answer(door: socket.socket, words: str, end: float, why: list[str], job: str) -> str:
    """The answer of rank 0 to a call; '' where what answers is not rank 0."""
    greeting = GREETING.fullmatch(_line(door, min(end, time.monotonic() + ATTEMPT_S)))
    if greeting is None:
        why[0] = STRANGE
        return ""
    signs = partial(signature, job, greeting[1], challenge := new_secret())
    door.sendall(f"fddp: {signs(words)} {challenge} {words}\n".encode())
    why[0] = "it is there, and waits for others"
    # Rank 0 was there first, so its time is over first.
    answered = _line(door, end + ATTEMPT_S)
    proof, _, answer = answered.rstrip("\n").partition(" ")
    if signed(proof, job, greeting[1], challenge, answer):
        return answer
    why[0] = STRANGE if answered else "it was there and has left"
    return ""


def _line(door: socket.socket, end: float) -> str:
    """Receives a line until a time; what came of it, if it has no end."""
    heard = b""
    while not heard.endswith(b"\n") and len(heard) < MOST:
        door.settimeout(max(end - time.monotonic(), 1e-3))
        more = door.recv(MOST - len(heard))
        if not more or time.monotonic() > end:
            break
        heard += more
    return heard.decode(errors="replace")


def _reason(error: Exception, place: tuple[str, int]) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"the name {place[0]!r} does not resolve"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nobody listens there yet"
    return (getattr(error, "strerror", None) or str(error)).lower()  # no route to host; timed out
