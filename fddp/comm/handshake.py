"""Handshakes over TCP: two processes prove to each other that they know the job's secret.

Each signs a fresh challenge of the other one, and some words of its own. The proofs are of one
topic: a proof for another purpose is none. The secret also signs pickles.

Source: challenge and response by HMAC (RFC 2104), as in Python's `multiprocessing.connection`.
"""

import errno
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

SECRET = "FDDP_SECRET"
PROOF_S = 10.0  # for a proof; many ranks may call at once
RETRY_S = 0.2
LENGTH = 2  # bytes in front of a text


def new_secret() -> str:
    """Returns a fresh secret for a job, or a fresh challenge."""
    return secrets.token_hex(16)


def signature(*values: str | bytes) -> str:
    """Signs values with the job's secret; without a secret the signature proves nothing."""
    signing = hmac.new(os.fsencode(os.environ.get(SECRET, "")), digestmod="sha256")
    for value in values:
        if isinstance(value, str):
            value = value.encode(errors="surrogateescape")
        signing.update(len(value).to_bytes(8, "big"))  # 'ab', 'c' are not 'a', 'bc'
        signing.update(value)
    return signing.hexdigest()


def signed(claim: object, *values: str | bytes) -> bool:
    """Returns True if `claim` is the values' signature, in equal time for all false claims."""
    text = b""
    if isinstance(claim, str):
        text = claim.encode(errors="replace")
    return hmac.compare_digest(text, signature(*values).encode())


def introduce(link: socket.socket, topic: str, words: str, end: float) -> str:
    """Proves this process to the acceptor, until a time, and it to this one; returns its words."""
    challenge, answer = receive(link, end), new_secret()
    for text in (answer, words, signature(topic, challenge, answer, words)):
        send(link, text)
    other_words = receive(link, end)
    if not signed(receive(link, end), topic, answer, challenge, other_words):
        raise ConnectionError("the process there is not of this job")
    return other_words


def call(
    address: tuple[str, int], topic: str, words: str, timeout_s: float
) -> tuple[str, socket.socket]:
    """Connects to a process in `timeout_s` and introduces this one; returns its words, too."""
    link = socket.create_connection(address, timeout_s)
    try:
        return introduce(link, topic, words, time.monotonic() + PROOF_S), link
    except OSError:
        link.close()
        raise


def answer_calls(
    door: socket.socket, topic: str, words: str, on_call: Callable[[str, socket.socket], object]
) -> threading.Thread:
    """Starts a thread that accepts calls; `on_call` gets the proven ones, on another thread."""

    def prove(link: socket.socket) -> None:
        end = time.monotonic() + PROOF_S
        challenge = new_secret()
        try:
            send(link, challenge)
            answer, other_words, proof = (receive(link, end) for _ in range(3))
            if not signed(proof, topic, challenge, answer, other_words):
                raise ConnectionError
            for text in (words, signature(topic, answer, challenge, words)):
                send(link, text)
        except OSError:
            link.close()
        else:
            on_call(other_words, link)

    def accept() -> None:
        while True:
            try:
                link, _ = door.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # it is shut
                    return
                time.sleep(RETRY_S)  # the limit of open files: strangers are dropped meanwhile
                continue
            threading.Thread(target=prove, args=(link,), daemon=True).start()

    thread = threading.Thread(target=accept, name="fddp-door", daemon=True)
    thread.start()
    return thread


@contextmanager
def calls_at(
    door: socket.socket, topic: str, words: str
) -> Iterator[SimpleQueue[tuple[str, socket.socket]]]:
    """Answers calls during a block; yields the callers' words and connections. Closes `door`."""
    called = SimpleQueue[tuple[str, socket.socket]]()
    answering = answer_calls(door, topic, words, lambda *call: called.put(call))
    try:
        yield called
    finally:
        with suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)
        door.close()
        answering.join(1.0)  # only Linux wakes it


def send(link: socket.socket, text: str) -> None:
    data = text.encode(errors="replace")
    link.sendall(len(data).to_bytes(LENGTH, "big") + data)


def receive(link: socket.socket, end: float) -> str:
    """Receives a text until the time `end`, and nothing behind it."""
    length = int.from_bytes(_exactly(link, LENGTH, end), "big")
    return _exactly(link, length, end).decode(errors="replace")


def _exactly(link: socket.socket, count: int, end: float) -> bytes:
    data = b""
    while len(data) < count:
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("no answer in time")
        link.settimeout(seconds)
        piece = link.recv(count - len(data))
        if not piece:
            raise ConnectionError("the process there has closed the connection")
        data += piece
    return data
