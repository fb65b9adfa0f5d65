"""Divides the compilation of programs among processes that share JAX's compilation cache.

Ranks of one host compile the same stages at the same time. With a common folder of JAX's cache,
each rank claims a program before it compiles it, continues with other programs if a neighbour was
first, and reads the neighbour's programs at the end.
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import jax

from fddp.jax_internals import compilation_cache

Made = TypeVar("Made")

CLAIMS = "fddp-claims"


def each_by_one(texts: Sequence[str], make: Callable[[int], Made]) -> list[Made]:
    """Compiles programs, each in one process only, if JAX's cache hands it to the others.

    `texts` tell the programs apart; `make` maps the number of a program to the program, compiled or
    read from JAX's cache. A process that ends releases its claims; no process waits for a program
    that its neighbour has not reached.

    Example:
      >>> each_by_one(["a", "b"], lambda number: 10 * number)
      [0, 10]
    """
    claims = _claims_file()
    if claims is None:
        return [make(number) for number in range(len(texts))]
    programs = dict[int, Made]()
    with claims as file:
        for waits in (False, True):
            for number in (k for k in range(len(texts)) if k not in programs):
                with _claim(file.fileno(), texts[number], waits) as claimed:
                    if claimed:
                        programs[number] = make(number)
    return [programs[number] for number in range(len(texts))]


def _claims_file() -> BinaryIO | None:
    """Opens the file of claims in JAX's compilation cache, if all processes can write there.

    If JAX runs several processes, it lets only one of them write to the cache.
    """
    folder = compilation_cache()
    if not folder or jax.process_count() > 1:
        return None
    try:
        return (Path(folder) / CLAIMS).open("ab")
    except OSError:  # another user's folder, or a remote one: each process compiles for itself
        return None


@contextmanager
def _claim(file: int, text: str, waits: bool) -> Iterator[bool]:
    """Locks one byte of a file, which stands for a program; yields True if the lock was taken."""
    offset = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, offset)
    except OSError:  # a neighbour has it, or the file system has no locks
        yield waits
        return
    try:
        yield True
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)
