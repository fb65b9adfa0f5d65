"""Links of JSON lines over TCP to rank 0's watcher, which the ranks have opened."""

import json
import resource
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

EVERY_S = 0.25  # between two checks of the rank, and between two reports
MOST = 1 << 16  # bytes of a line
SEND_S = 2.0  # for a watcher that reads nothing
SPARE = 1024  # files that a process may open in addition to its links

Links = dict[socket.socket, bytearray]


def allow_files(count: int) -> None:
    """Lets this process open `count` files and some more, as far as the system allows."""
    count += SPARE
    with suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard >= 0:  # negative: no limit
            count = min(count, hard)
        if 0 <= soft < count:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


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
