"""Starts ranks from Python: runs one function in fresh processes that find each other.

Each process imports the modules that it needs by itself, so the one that calls may have used JAX before. Its standard
output and error are theirs too.

Source: `torch.multiprocessing.spawn`.
"""

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import jax

from fddp.comm import leave
from fddp.runtime.launchers import worlds
from fddp.runtime.signals import collected
from fddp.runtime.world import fails
from fddp.wording import check_seconds, check_whole

Result = TypeVar("Result")
CAME = "came"
DONE = "done"
FAILED = "failed"
END_S = 10.0  # so long a rank that has failed waits to be ended
SIGNAL_S = 0.1  # between two looks for signals
LOOK_S = 0.01  # between two looks at a rank that seems to have ended
WATCHERS_S = 4.0  # so long the watchers have to say where a rank has died


class Rank(NamedTuple):
    """A process that was started."""

    process: BaseProcess
    door: Connection
    """The pipe through which it tells what has become of it."""


def launch(fn: Callable[..., Result], processes: int, *args: Any, timeout_s: float | None = None) -> list[Result]:
    """Runs a function on so many ranks, each a fresh process of this host, and returns what it returned on each.

    `fddp.init()` inside joins them: over NCCL, a GPU each, where there are GPUs, else over Gloo. If one rank fails, or
    this call is interrupted, all are ended. A script calls it below `if __name__ == "__main__":`, for each process
    imports the script anew.

    The function, its arguments and its results are pickled. A function of a module or of the script is found by its
    name. A lambda, a function inside another one, and one of a notebook's cell have no name that another process could
    find: they need the package cloudpickle, or a place in a module.

    Args:
      fn: what each rank runs. It tells them apart by `fddp.init().rank`.
      processes: how many ranks.
      *args: its arguments, the same on all ranks.
      timeout_s: seconds after which all are ended; None: no limit.

    Returns:
      The results, in order of rank.

    Raises:
      RuntimeError: a rank failed; shows its traceback.
      TimeoutError: not all have ended in time.
      ValueError: the function has no name that another process could find, or a number is out of range.

    Example:
      >>> import fddp, os
      >>> fddp.launch(os.getenv, 2, "FDDP_RANK")
      ['0', '1']
    """
    if not callable(fn):
        raise TypeError(f"fddp.launch: fn must be a function, got {fn!r}.")
    processes = check_whole("fddp.launch: processes", processes, 1)
    if timeout_s is not None:
        check_seconds("fddp.launch: timeout_s", timeout_s)
    work = _pickled(fn, args)
    end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    ranks = list[Rank]()
    with collected(*_interrupts()) as signals:
        try:
            for world in worlds(processes):
                ranks.append(_start(work, world))
            return _results(ranks, end, timeout_s, signals)
        finally:
            for rank in ranks:
                _end(rank)


### The process that calls


def _pickled(fn: Callable, args: tuple) -> bytes:
    main = sys.modules["__main__"]
    in_a_cell = getattr(fn, "__module__", "") == "__main__" and not (
        getattr(main, "__file__", None) or getattr(main, "__spec__", None)
    )
    problem = "it was defined in a notebook or at a prompt"
    if not in_a_cell:
        try:
            return pickle.dumps((fn, args))
        except Exception as error:  # whatever the objects in it raise
            problem = str(error)
    if find_spec("cloudpickle") is None:
        raise ValueError(
            f"fddp.launch: no other process can be given {_name(fn)} and its arguments ({problem}): write it into a "
            "module and import it from there, or pip install cloudpickle."
        )
    return importlib.import_module("cloudpickle").dumps((fn, args))


def _start(work: bytes, world: Mapping[str, str]) -> Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, theirs), name=f"rank {world['FDDP_RANK']}")
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    with theirs, _environment({**world, **({"JAX_PLATFORMS": platforms} if platforms else {})}):
        process.start()
    return Rank(process, ours)


_starting = threading.Lock()


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Changes this process's environment while another one is started, whose modules may read it on import."""
    with _starting:
        before = {name: os.environ.get(name) for name in more}
        os.environ.update(more)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _interrupts() -> list[int]:
    """The signals that Python would turn into a KeyboardInterrupt here."""
    in_main = threading.current_thread() is threading.main_thread()
    python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return [signal.SIGINT] if in_main and python else []


def _results(ranks: Sequence[Rank], end: float, timeout_s: float | None, signals: Sequence[int]) -> list[Any]:
    """Waits until all ranks have ended well, or a signal interrupts this process."""
    size = len(ranks)
    results = dict[int, Any]()
    came = set[int]()
    silent = set[int]()  # ranks whose pipe is at its end
    while left := [k for k, rank in enumerate(ranks) if k not in results or rank.process.exitcode is None]:
        if signals:
            raise KeyboardInterrupt
        if (seconds := end - time.monotonic()) <= 0:
            late = ", ".join(map(str, left))
            raise TimeoutError(f"fddp.launch(timeout_s={timeout_s:g}): ranks {late} of {size} have not ended in time.")
        doors = {ranks[k].door: k for k in left if k not in results and k not in silent}
        ends = {ranks[k].process.sentinel: k for k in left}
        ready = wait([*doors, *ends], min(seconds, SIGNAL_S))
        # What a rank has said counts before its end.
        for k in [doors[one] for one in ready if isinstance(one, Connection)]:
            try:
                kind, told = ranks[k].door.recv()
            except (EOFError, OSError):  # it said no more, or ended within a word
                silent.add(k)
                continue
            if kind == FAILED:
                raise RuntimeError(f"fddp.launch: rank {k} of {size} failed:\n{told}")
            if kind == DONE:
                results[k] = pickle.loads(told)
            came.add(k)
        for k in [ends[one] for one in ready if isinstance(one, int)]:
            ranks[k].process.join(0)
            if ranks[k].process.exitcode is None:  # about to end, or it has closed all its files and goes on
                time.sleep(LOOK_S)
                continue
            nothing = k not in results and (k in silent or not ranks[k].door.poll())
            if ranks[k].process.exitcode or nothing:
                wait([rank.process.sentinel for rank in ranks if rank is not ranks[k]], WATCHERS_S)
                raise RuntimeError(_died(k, size, ranks[k].process.exitcode or 0, k in came, k in results))
    return [results[k] for k in range(size)]


def _died(rank: int, size: int, code: int, came: bool, done: bool) -> str:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    words = f"fddp.launch: rank {rank} of {size} ended {how}"
    if done:
        return f"{words} after the function had returned."
    if came:
        return f"{words} and has not returned from the function; what it wrote may say why."
    return f"{words} while it started: a script calls fddp.launch below `if __name__ == '__main__':`."


def _end(rank: Rank) -> None:
    """Ends a rank with all that it has started."""
    rank.door.close()
    process = rank.process
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended, or has no group of its own yet
        process.kill()
    process.join()


### A rank


def _run(work: bytes, door: Connection) -> None:
    # A session of its own: what a terminal sends is for the process that called, which ends all.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        door.send((CAME, None))
        fn, args = pickle.loads(work)
        door.send((DONE, _packed(fn, fn(*args))))
    except BaseException as error:  # sys.exit too: the function has not returned
        if fails(error):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            door.send((FAILED, traceback.format_exc()))
            time.sleep(END_S)  # until it is ended; if it left, the watchers would say so
        leave()


def _packed(fn: Callable, result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:  # whatever the objects in it raise
        raise TypeError(f"fddp.launch: what {_name(fn)} returned cannot be pickled; return arrays, say") from error


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _end_with_parent() -> None:
    """Ends this rank when its parent has ended: nobody waits for it any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
