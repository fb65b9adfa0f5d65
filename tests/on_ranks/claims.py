"""Claims that every rank of a job asserts; all run in a single job, so that processes start
once."""

import faulthandler
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax
import numpy as np

import fddp
from fddp.step.options import ScheduleName

Case = TypeVar("Case")

SCHEDULES: tuple[ScheduleName, ...] = ("overlap", "after")
# Under which schedules the jobs of the default tier do not hold a claim. That "after" trains as
# "overlap" does is claimed by `train_step.py` and `step/test_cases.py`.
LEFT_OUT = {("mpi", 3): ("after",), ("gloo", 2): ("after",)}
HELD = "held"
STALLED_S = (
    900.0  # a claim compiles several programs, on a machine that all ranks and other tests share
)


@dataclass(frozen=True)
class Claim:
    """A claim, in its name, that holds on every rank of some kinds of jobs."""

    check: Callable[[fddp.Group], None]
    """Raises on each rank that does not meet the claim."""
    backends: tuple[str, ...]
    sizes: tuple[int, ...]
    quick: tuple[str, ...]
    """The jobs that run the claim in the default tier: one backend if it compiles much; `slow` has
    all."""


def claim(
    *,
    backends: tuple[str, ...] = ("mpi", "gloo"),
    sizes: tuple[int, ...] = (2, 3, 4),
    quick: tuple[str, ...] = ("mpi", "gloo"),
) -> Callable[[Callable[[fddp.Group], None]], Claim]:
    """Makes a claim of a function of a group."""
    return lambda check: Claim(check, backends, sizes, quick)


def claims_of(*modules: ModuleType) -> dict[str, Claim]:
    """All claims of some modules by name, in the order in which they are written."""
    return {
        name: x for module in modules for name, x in vars(module).items() if isinstance(x, Claim)
    }


def hold(claims: Mapping[str, Claim], group: fddp.Group, folder: Path) -> None:
    """Checks claims one after the other.

    FOLDER/RANK.json has a line for each: [name, "held" or a traceback, seconds].
    """
    with (folder / f"{group.rank}.json").open("w") as report:
        for name, claim in claims.items():
            began = time.monotonic()
            faulthandler.dump_traceback_later(
                STALLED_S, exit=True
            )  # says where a rank waits in vain
            try:
                claim.check(group)
                result = HELD
            except Exception:  # the other claims are still to be checked
                result = traceback.format_exc()
            report.write(json.dumps([name, result, time.monotonic() - began]) + "\n")
            report.flush()
    faulthandler.cancel_dump_traceback_later()


def schedules(group: fddp.Group) -> list[ScheduleName]:
    """The schedules under which this job holds a claim: a sample in the default tier."""
    left_out = LEFT_OUT.get((group.backend, group.processes), ())
    return [name for name in SCHEDULES if name not in left_out]


def sampled(group: fddp.Group, cases: Sequence[Case]) -> Sequence[Case]:
    """The cases of a claim that this job holds: in the default tier MPI every second one, Gloo the
    others."""
    job = group.backend, group.processes
    return cases[group.backend == "gloo" :: 2] if job in LEFT_OUT else cases


def error_of(call: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """The message of the error that a call must raise on this rank."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def same_on_all_ranks(group: fddp.Group, tree: Any) -> bool:
    """True if a tree has the same bits on every rank."""
    data = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
    gathered = group.all_gather(np.frombuffer(data, np.uint8))
    return bool(np.all(gathered == gathered[0]))


def on_the_wire(group: fddp.Group, nbytes: int) -> int:
    """Bytes that each replica sends in an all-reduce of so many; parts of bytes count as bytes."""
    return -(-nbytes * 2 * (group.size - 1) // group.size)
