"""A rank waits last for a program that a neighbour compiles, and no neighbour keeps it from being
compiled."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from fddp.schedules.claims import CLAIMS, each_by_one

# Claims "a" until it reads a line, or for ever.
NEIGHBOUR = """
import sys, jax
from fddp.schedules.claims import CLAIMS, each_by_one
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
each_by_one(["a"], lambda number: (print("claimed", flush=True), sys.stdin.readline()))
"""


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    """The suite's own compilation cache is set aside."""
    before: Any = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def cache(no_cache: None, tmp_path: Path) -> str:
    """A compilation cache of JAX that processes have in common."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    return str(tmp_path)


@contextmanager
def neighbour(cache: str) -> Iterator[subprocess.Popen[str]]:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", NEIGHBOUR, cache], **pipes) as process:
        assert process.stdout and process.stdout.readline() == "claimed\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.ranks
def test_what_a_neighbour_compiles_is_made_last(cache):
    with neighbour(cache) as process:
        calls = list[int]()

        def make(number: int) -> int:
            calls.append(number)
            if number == 1:  # the neighbour is done
                assert process.stdin
                process.stdin.write("\n")
                process.stdin.flush()
            return 10 * number

        assert each_by_one(["a", "b"], make) == [0, 10]
        assert calls == [1, 0]


@pytest.mark.ranks
def test_a_neighbour_that_dies_gives_back_what_it_has_claimed(cache):
    with neighbour(cache) as process:

        def make(number: int) -> str:
            if number == 1:
                process.kill()
            return "made"

        assert each_by_one(["a", "b"], make) == ["made", "made"]


def test_an_error_gives_claims_back_and_is_raised(cache):
    def fail(number: int) -> None:
        raise ValueError(f"program {number}")

    with pytest.raises(ValueError, match="program 0"):
        each_by_one(["a"], fail)
    assert each_by_one(["a"], lambda number: number) == [0]


def test_without_a_cache_programs_are_made_in_their_order():
    calls = list[int]()
    each_by_one(["b", "a"], calls.append)
    assert calls == [0, 1]


def test_where_no_claim_can_be_written_each_process_compiles_for_itself(cache):
    (Path(cache) / CLAIMS).mkdir()
    assert each_by_one(["a", "b"], lambda number: number) == [0, 1]
