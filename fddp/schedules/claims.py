"""Divides the compiling of programs among processes that share JAX's compilation cache.

Ranks of one host compile the same stages at the same time. With a folder of JAX's own cache in common, each rank
claims a program before it compiles it, goes on with others where a neighbour was first, and reads those at the end.
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
    """Compiles programs, each in one of the processes that want it, where JAX's cache keeps it for the others.

    A process that ends gives its claims back; no process waits for one that has not yet come to a program.

    Args:
      texts: what tells the programs apart.
      make: number of a program → the program, compiled or read from JAX's cache.

    Returns:
      The programs, in their order.

    Example:
      >>> each_by_one(["a", "b"], lambda number: 10 * number)
      [0, 10]
    """
    shared = _shared_file()
    if shared is None:
        return [make(number) for number in range(len(texts))]
    made = dict[int, Made]()
    with shared as file:
        for waits in (False, True):
            for number in (k for k in range(len(texts)) if k not in made):
                with _claim(file.fileno(), texts[number], waits) as mine:
                    if mine:
                        made[number] = make(number)
    return [made[number] for number in range(len(texts))]


def _shared_file() -> BinaryIO | None:
    """Opens the file of claims in JAX's compilation cache; None: there is no cache in which all processes can write.

    Where JAX's processes are several it lets one of them alone write there.
    """
    folder = compilation_cache()
    if not folder or jax.process_count() > 1:
        return None
    try:
        return (Path(folder) / CLAIMS).open("ab")
    except OSError:  # it belongs to another user, or is no folder of this machine: each process compiles for itself
        return None


@contextmanager
def _claim(file: int, text: str, waits: bool) -> Iterator[bool]:
    """Claims a program while its block runs: one byte of a file, which is locked; says whether it is claimed."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, place)
    except OSError:  # a neighbour has it, or the file system knows no locks
        yield waits
        return
    try:
        yield True
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
