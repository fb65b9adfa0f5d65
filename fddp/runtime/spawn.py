"""Starts ranks from Python: runs one function in new processes that find each other.

Each process imports its modules itself, so the calling process may already have used JAX. The ranks
share its standard output and error.

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
from fddp.runtime.signals import collect_signals
from fddp.runtime.world import fails
from fddp.wording import check_seconds, check_whole

Result = TypeVar("Result")
CAME = "came"
DONE = "done"
FAILED = "failed"
END_S = 10.0  # seconds for which a failed rank waits to be killed
SIGNAL_S = 0.1  # between two checks for signals
LOOK_S = 0.01  # between two checks of a rank that seems to have ended
WATCHERS_S = 4.0  # for the watchers to report where a rank has died


class Rank(NamedTuple):
    """A started process."""

    process: BaseProcess
    door: Connection
    """The pipe for its result or failure."""


def launch(
    fn: Callable[..., Result], processes: int, *args: Any, timeout_s: float | None = None
) -> list[Result]:
    """Runs a function on several ranks, each a new process of this host, and returns their results.

    `fddp.init()` inside the function joins the ranks: over NCCL with one GPU per rank, or over Gloo
    without GPUs. If a rank fails or this call is interrupted, all ranks are killed. A script must
    call it below `if __name__ == "__main__":`, because each process imports the script again.

    The function, its arguments and its results are pickled. A function of a module or of the script
    is found by its name. A lambda, a nested function and a function of a notebook's cell cannot be
    found: they need the package cloudpickle, or a place in a module.

    Args:
      fn: the function that each rank runs. `fddp.init().rank` distinguishes the ranks.
      processes: number of ranks.
      *args: arguments of the function, equal on all ranks.
      timeout_s: seconds after which all ranks are killed; None: no limit.

    Returns:
      The results, in order of rank.

    Raises:
      RuntimeError: a rank failed; the message has its traceback.
      TimeoutError: not all ranks have ended in time.
      TypeError: `fn` is not callable.
      ValueError: another process cannot find the function, or a number is out of range.

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
    with collect_signals(*_interrupts()) as signals:
        try:
            for world in worlds(processes):
                ranks.append(_start(work, world))
            return _results(ranks, end, timeout_s, signals)
        finally:
            for rank in ranks:
                _end(rank)


### The calling process


def _pickled(fn: Callable, args: tuple) -> bytes:
    main = sys.modules["__main__"]
    in_a_cell = getattr(fn, "__module__", "") == "__main__" and not (
        getattr(main, "__file__", None) or getattr(main, "__spec__", None)
    )
    problem = "it was defined in a notebook or at a prompt"
    if not in_a_cell:
        try:
            return pickle.dumps((fn, args))
        except Exception as error:  # an object may raise anything
            problem = str(error)
    if find_spec("cloudpickle") is None:
        raise ValueError(
            f"fddp.launch: {_name(fn)} and its arguments cannot be sent to another process "
            f"({problem}): write it into a module and import it from there, or pip install "
            "cloudpickle."
        )
    return importlib.import_module("cloudpickle").dumps((fn, args))


def _start(work: bytes, world: Mapping[str, str]) -> Rank:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, sender), name=f"rank {world['FDDP_RANK']}")
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    with sender, _environment({**world, **({"JAX_PLATFORMS": platforms} if platforms else {})}):
        process.start()
    return Rank(process, receiver)


_starting = threading.Lock()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Changes this process's environment while a rank starts: modules may read it on import."""
    with _starting:
        previous = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _interrupts() -> list[int]:
    """The signals that would raise a KeyboardInterrupt in this thread."""
    in_main = threading.current_thread() is threading.main_thread()
    python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return [signal.SIGINT] if in_main and python else []


def _results(
    ranks: Sequence[Rank], end: float, timeout_s: float | None, signals: Sequence[int]
) -> list[Any]:
    """Waits until all ranks have ended without error; a failure, signal or timeout raises."""
    size = len(ranks)
    results = dict[int, Any]()
    started = set[int]()
    silent = set[int]()  # ranks whose pipe is closed
    while pending := [
        k for k, rank in enumerate(ranks) if k not in results or rank.process.exitcode is None
    ]:
        if signals:
            raise KeyboardInterrupt
        if (seconds := end - time.monotonic()) <= 0:
            names = ", ".join(map(str, pending))
            raise TimeoutError(
                f"fddp.launch(timeout_s={timeout_s:g}): ranks {names} of {size} have not ended in "
                "time."
            )
        doors = {ranks[k].door: k for k in pending if k not in results and k not in silent}
        ends = {ranks[k].process.sentinel: k for k in pending}
        ready = wait([*doors, *ends], min(seconds, SIGNAL_S))
        # A rank's message counts before its end.
        for k in [doors[file] for file in ready if isinstance(file, Connection)]:
            try:
                kind, payload = ranks[k].door.recv()
            except (EOFError, OSError):  # no message, or the rank ended within one
                silent.add(k)
                continue
            if kind == FAILED:
                raise RuntimeError(f"fddp.launch: rank {k} of {size} failed:\n{payload}")
            if kind == DONE:
                results[k] = pickle.loads(payload)
            started.add(k)
        for k in [ends[file] for file in ready if isinstance(file, int)]:
            ranks[k].process.join(0)
            # The rank is about to end, or it has closed all its files and continues.
            if ranks[k].process.exitcode is None:
                time.sleep(LOOK_S)
                continue
            no_result = k not in results and (k in silent or not ranks[k].door.poll())
            if ranks[k].process.exitcode or no_result:
                wait([rank.process.sentinel for rank in ranks if rank is not ranks[k]], WATCHERS_S)
                raise RuntimeError(
                    _died(k, size, ranks[k].process.exitcode or 0, k in started, k in results)
                )
    return [results[k] for k in range(size)]


def _died(rank: int, size: int, code: int, started: bool, done: bool) -> str:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    words = f"fddp.launch: rank {rank} of {size} ended {how}"
    if done:
        return f"{words} after the function had returned."
    if started:
        return f"{words} and has not returned from the function; its output may show the reason."
    return (
        f"{words} while it started: a script calls fddp.launch below `if __name__ == '__main__':`."
    )


def _end(rank: Rank) -> None:
    """Kills a rank and all processes of its group."""
    rank.door.close()
    process = rank.process
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended, or has no group yet
        process.kill()
    process.join()


### A rank


def _run(work: bytes, door: Connection) -> None:
    # A new session: signals of a terminal are for the calling process, which ends all ranks.
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
            time.sleep(END_S)  # until it is killed; if it left, the watchers would report that
        leave()


def _packed(fn: Callable, result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:  # an object may raise anything
        raise TypeError(
            f"fddp.launch: the result of {_name(fn)} cannot be pickled; return arrays, for example"
        ) from error


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _end_with_parent() -> None:
    """Kills this rank once its parent has ended: no process waits for its result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
