"""Starts ranks from Python: runs one function in new processes that find each other.

Each process imports its modules itself, so the calling process may already have used JAX. The ranks
share its standard output and error.

Source: `torch.multiprocessing.spawn`.
"""

import importlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import jax

from fddp.runtime.children import collect_signals, describe_end, exit_code, kill_groups
from fddp.runtime.launchers import worlds
from fddp.runtime.place import environment
from fddp.runtime.watching import flush_output, leave
from fddp.runtime.world import fails
from fddp.wording import check_seconds, check_whole

Result = TypeVar("Result")

END_S = 10.0  # seconds for which a failed rank waits to be killed
LOOK_S = 0.05  # between two checks for signals and ended ranks
WATCHERS_S = 4.0  # for the watchers to report where a rank has died


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
      TypeError: `fn` is not callable, or an argument cannot be pickled.
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
    ranks = list[Rank]()
    # The signal, if it would raise a KeyboardInterrupt in this thread.
    in_main = threading.current_thread() is threading.main_thread()
    interrupts = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with collect_signals(*[signal.SIGINT] * interrupts) as signals:
        try:
            for world in worlds(processes):
                ranks.append(_start(work, world))
            _wait(ranks, timeout_s, signals)
        finally:
            kill_groups(rank.pid for rank in ranks)
            for rank in ranks:
                rank.pipe.close()
                rank.process.join()
    return [pickle.loads(rank.result or b"") for rank in ranks]


### The calling process


@dataclass
class Rank:
    """A started process, and the messages that it has sent."""

    number: int
    name: str
    process: BaseProcess
    pid: int
    pipe: Connection
    """Receives its messages."""
    open: bool = True
    """False once no more messages can arrive."""
    result: bytes | None = None

    def exit_code(self) -> int | None:
        try:
            return exit_code(self.pid)
        except ChildProcessError:  # multiprocessing reaps ended processes when it starts another
            return self.process.exitcode

    def receive(self) -> None:
        """Receives its messages so far; raises RuntimeError if one reports a failure."""
        try:
            while self.open and self.pipe.poll():
                self.result, failure = self.pipe.recv()
                if failure:
                    raise RuntimeError(f"fddp.launch: {self.name} failed:\n{failure}")
        except (EOFError, OSError):  # it has ended, perhaps within a message, or closed its files
            self.open = False


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
    dumps = importlib.import_module("cloudpickle").dumps
    for k, x in enumerate((fn, *args)):
        try:
            dumps(x)
        except Exception as error:
            name = f"argument {k} of {_name(fn)}" if k else _name(fn)
            raise TypeError(f"fddp.launch: {name} cannot be pickled ({error}).") from error
    return dumps((fn, args))


def _start(work: bytes, world: Mapping[str, str]) -> Rank:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    rank = world["FDDP_RANK"]
    process = context.Process(target=_run, args=(work, sender), name=f"rank {rank}")
    variables = dict(world)
    if platforms := jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        variables["JAX_PLATFORMS"] = platforms
    with sender, environment(variables):  # modules may read it on import
        process.start()
    pid: Any = process.pid
    return Rank(int(rank), f"rank {rank} of {world['FDDP_SIZE']}", process, pid, receiver)


def _wait(ranks: Sequence[Rank], timeout_s: float | None, signals: Sequence[int]) -> None:
    """Waits until all ranks have ended without error; a failure, signal or timeout raises."""
    end = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    pending = list(ranks)
    while pending:
        if signals:
            raise KeyboardInterrupt
        seconds = end - time.monotonic()
        if seconds <= 0:
            numbers = ", ".join(str(rank.number) for rank in pending)
            raise TimeoutError(
                f"fddp.launch(timeout_s={timeout_s:g}): ranks {numbers} of {len(ranks)} have not "
                "ended in time."
            )
        wait([rank.pipe for rank in pending if rank.open], min(seconds, LOOK_S))
        # An ended rank sends no more messages. They count before its end.
        codes = [rank.exit_code() for rank in pending]
        for rank in pending:
            rank.receive()
        for rank, code in zip(pending, codes):
            if code or (code == 0 and rank.result is None):
                wait([x.process.sentinel for x in ranks if x is not rank], WATCHERS_S)
                when = "after the function had returned"
                if rank.result is None:
                    when = "and has not returned from the function; its output may show the reason"
                raise RuntimeError(f"fddp.launch: {rank.name} ended {describe_end(code)} {when}.")
        pending = [rank for rank, code in zip(pending, codes) if code is None]


### A rank


def _run(work: bytes, pipe: Connection) -> None:
    # A new session: signals of a terminal are for the calling process, which ends all ranks.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        fn, args = _unpickled(work)
        pipe.send((_packed(fn, fn(*args)), None))
    except BaseException as error:  # sys.exit too: the function has not returned
        if fails(error):
            flush_output()
            pipe.send((None, traceback.format_exc()))
            time.sleep(END_S)  # until it is killed; if it left, the watchers would report that
        leave()


def _unpickled(work: bytes) -> tuple[Callable, tuple]:
    try:
        return pickle.loads(work)
    except AttributeError as error:
        raise ValueError(
            f"fddp.launch: this rank does not find the function, or the class of an argument "
            f"({error}): define it in a module, or in the script above "
            "`if __name__ == '__main__':`."
        ) from error


def _packed(fn: Callable, result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:  # an object may raise anything
        raise TypeError(
            f"fddp.launch: the result of {_name(fn)} cannot be pickled; return arrays, for "
            "example, or fddp.whole(state)"
        ) from error


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _end_with_parent() -> None:
    """Kills this rank once its parent has ended: no process waits for its result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # The watchers report the death of a rank and not its reason.
        rank = os.environ["FDDP_RANK"]
        with suppress(OSError):  # a closed pipe
            os.write(2, f"fddp.launch: the caller has ended, and with it rank {rank}.\n".encode())
        os.killpg(0, signal.SIGKILL)
