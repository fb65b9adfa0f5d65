"""Links between watchers: lines of JSON over TCP, through rank 0's watcher, for those that know the job's token."""

import hmac
import json
import resource
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from mmap import mmap
from typing import Any

from .shared_memory import PORT

EVERY_S = 0.25  # between two looks at the rank, and two reports of it
MOST = 1 << 16  # bytes of a line

WELCOME_S = 10.0  # in which a newcomer proves that it knows the token
CHALLENGE = 32  # bytes
SPARE = 1024  # files that a process may open beside its links

Links = dict[socket.socket, bytearray]


Newcomers = dict[socket.socket, tuple[bytes, float]]
"""Connections that have proved nothing yet: the challenge, and the time at which they are closed."""


def allow_files(count: int) -> None:
    """Lets this process open so many files and some more, as far as the system allows."""
    count += SPARE
    with suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < count:  # negative: no limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard) if hard >= 0 else count, hard))


def meet(memory: mmap, job: Mapping[str, Any]) -> tuple[socket.socket | None, Links]:
    """Opens the door of rank 0's watcher, or connects to it."""
    if job["rank"] == 0:
        door = socket.create_server((job["bind"], 0), backlog=job["size"])
        PORT.write(memory, door.getsockname()[1])
        return door, {}
    for host, port in job["addresses"]:
        try:
            link = socket.create_connection((host, port), timeout=2.0)
            link.settimeout(WELCOME_S)
            challenge = link.recv(CHALLENGE)
            link.sendall(proof(job["token"], challenge))
            link.settimeout(2.0)
            return None, {link: bytearray()}
        except OSError:
            continue
    say(f"rank {job['rank']} of {job['size']} reaches no watcher at {job['addresses']}.")
    return None, {}


def welcome(door: socket.socket, newcomers: Newcomers) -> None:
    """Lets a newcomer in, who is to prove that it knows the token."""
    try:
        link, _ = door.accept()
    except OSError:  # it has left again, or this process may open no more files: then the door stays ready
        time.sleep(EVERY_S)
        return
    link.settimeout(1.0)
    challenge = secrets.token_bytes(CHALLENGE)
    newcomers[link] = challenge, time.monotonic() + WELCOME_S
    with suppress(OSError):
        link.sendall(challenge)


def admit(newcomers: Newcomers, links: Links, token: str, moved: Set[Any]) -> None:
    """Makes links of newcomers that know the token; gives others no answer, and closes them in time."""
    for link, (challenge, until) in list(newcomers.items()):
        if link not in moved and time.monotonic() < until:
            continue
        del newcomers[link]
        heard = b""
        if link in moved:
            with suppress(OSError):
                heard = link.recv(MOST)  # a proof is sent at once
        if hmac.compare_digest(heard, proof(token, challenge)):
            links[link] = bytearray()
        else:
            link.close()


def proof(token: str, challenge: bytes) -> bytes:
    """The proof that its sender knows the token, without the token."""
    return hmac.digest(token.encode(), challenge, "sha256")


def ready(files: Iterable[socket.socket | int], seconds: float) -> set[Any]:
    """Waits until some of these can be read, not for long, and returns those; their numbers may be any."""
    with selectors.PollSelector() as watch:  # `select` knows none above 1023, and there is a link for each rank
        for file in files:
            watch.register(file, selectors.EVENT_READ)
        return {key.fileobj for key, _ in watch.select(seconds)}


def lines(link: socket.socket, links: Links) -> Iterator[dict[str, Any]]:
    """Yields the lines that came; closes a link that has ended, or that sends anything but lines of ours."""
    buffer = links[link]
    try:
        more = link.recv(MOST)
        buffer += more
        *whole, rest = bytes(buffer).split(b"\n")
        said = [json.loads(line) for line in whole]
        if not more or len(rest) > MOST or not all(isinstance(line, dict) for line in said):
            raise ValueError
        links[link] = bytearray(rest)
        yield from said
    except (OSError, ValueError):
        del links[link]
        link.close()


def wait_for_others(links: Links, seconds: float) -> None:
    """Waits until the watchers of the other ranks have ended their ranks, and themselves."""
    until = time.monotonic() + seconds
    while links and time.monotonic() < until:
        for link in ready(links, EVERY_S):
            list(lines(link, links))


def send(links: Links, line: Mapping[str, Any]) -> None:
    text = json.dumps(line).encode() + b"\n"
    for link in list(links):
        try:
            link.sendall(text)
        except OSError:
            del links[link]
            link.close()


def say(text: str) -> None:
    """Writes a line to the rank's stderr, if somebody still reads there."""
    with suppress(OSError):
        print(f"fddp: {text}", file=sys.stderr, flush=True)
