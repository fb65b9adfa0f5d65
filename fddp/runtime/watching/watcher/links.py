"""Links of JSON lines over TCP to rank 0's watcher, for watchers with the job's token."""

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

EVERY_S = 0.25  # between two checks of the rank, and between two reports
MOST = 1 << 16  # bytes of a line

WELCOME_S = 10.0  # seconds for a newcomer's proof that it knows the token
CHALLENGE = 32  # bytes
PROOF = 32  # bytes
SPARE = 1024  # files that a process may open in addition to its links

Links = dict[socket.socket, bytearray]


Newcomers = dict[socket.socket, tuple[bytes, float]]
"""Connection of a newcomer → its challenge, and its deadline for the proof."""


def allow_files(count: int) -> None:
    """Lets this process open `count` files and some more, as far as the system allows."""
    count += SPARE
    with suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard >= 0:  # negative: no limit
            count = min(count, hard)
        if 0 <= soft < count:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def connect_watchers(memory: mmap, job: Mapping[str, Any]) -> tuple[socket.socket | None, Links]:
    """Listens for the other watchers on rank 0; connects to rank 0's watcher on other ranks."""
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
    write_stderr(f"rank {job['rank']} of {job['size']} reaches no watcher at {job['addresses']}.")
    return None, {}


def welcome(door: socket.socket, newcomers: Newcomers) -> None:
    """Accepts a newcomer and sends it a challenge."""
    try:
        link, _ = door.accept()
    except OSError:
        # The newcomer has left, or this process may open no more files: then the door stays ready.
        time.sleep(EVERY_S)
        return
    link.settimeout(1.0)
    challenge = secrets.token_bytes(CHALLENGE)
    newcomers[link] = challenge, time.monotonic() + WELCOME_S
    with suppress(OSError):
        link.sendall(challenge)


def admit_newcomers(newcomers: Newcomers, links: Links, token: str, readable: Set[Any]) -> None:
    """Links newcomers with a valid proof; an invalid proof or a timeout closes the connection."""
    for link, (challenge, deadline) in list(newcomers.items()):
        if link not in readable and time.monotonic() < deadline:
            continue
        del newcomers[link]
        data = b""
        if link in readable:
            with suppress(OSError):
                data = link.recv(PROOF)  # its first report may have arrived, too
        if hmac.compare_digest(data, proof(token, challenge)):
            links[link] = bytearray()
        else:
            link.close()


def proof(token: str, challenge: bytes) -> bytes:
    """Returns the HMAC of the challenge with the token as key."""
    return hmac.digest(token.encode(), challenge, "sha256")


def wait_readable(files: Iterable[socket.socket | int], seconds: float) -> set[Any]:
    """Waits at most `seconds` until files can be read; returns the readable files."""
    # `select` is limited to file numbers below 1024, and rank 0's watcher has a link per rank.
    with selectors.PollSelector() as watch:
        for file in files:
            watch.register(file, selectors.EVENT_READ)
        return {key.fileobj for key, _ in watch.select(seconds)}


def lines(link: socket.socket, links: Links) -> Iterator[dict[str, Any]]:
    """Yields the received lines; closes a link at its end or after invalid data."""
    buffer = links[link]
    try:
        data = link.recv(MOST)
        buffer += data
        *texts, remainder = bytes(buffer).split(b"\n")
        messages = [json.loads(text) for text in texts]
        valid = all(isinstance(message, dict) for message in messages)
        if not data or len(remainder) > MOST or not valid:
            raise ValueError
        links[link] = bytearray(remainder)
        yield from messages
    except (OSError, ValueError):
        del links[link]
        link.close()


def wait_for_others(links: Links, seconds: float) -> None:
    """Waits at most `seconds` until the other watchers have ended their ranks and themselves."""
    deadline = time.monotonic() + seconds
    while links and time.monotonic() < deadline:
        for link in wait_readable(links, EVERY_S):
            list(lines(link, links))


def send(links: Links, line: Mapping[str, Any]) -> None:
    text = json.dumps(line).encode() + b"\n"
    for link in list(links):
        try:
            link.sendall(text)
        except OSError:
            del links[link]
            link.close()


def write_stderr(text: str) -> None:
    """Prints a line on the rank's stderr, if it is still open."""
    with suppress(OSError):
        print(f"fddp: {text}", file=sys.stderr, flush=True)
