"""A training that ended goes on from its newest whole checkpoint, bit for bit.

Replicas are equal, so rank 0 writes for all, on a thread of its own while training goes on; when it reads, it hands
round what it has read. So nothing depends on the backend, and little on the number of processes.

Source: Orbax's `CheckpointManager`.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from fddp.checkpoints.files import Saved, newest, opened, unfinished, write
from fddp.checkpoints.host_arrays import check_names, handed_round, laid, whole
from fddp.comm import Group, nothing_to_compare, verify
from fddp.step import TrainState
from fddp.training import TrainStep


class Checkpoints:
    """Checkpoints of a training: saved now and then while it goes on, and the newest whole one to go on from.

    Every rank makes one and calls the same; rank 0 alone reads and writes the folder. Of buffers that are not broadcast
    rank 0's are saved, as in DDP.

    Example:
      >>> import fddp, jax.numpy as jnp, optax, tempfile
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.25))
      >>> folder = tempfile.TemporaryDirectory()
      >>> with fddp.Checkpoints(folder.name, step, every=2) as checkpoints:
      ...     state, _ = checkpoints.restore(step.init(jnp.zeros(())))
      ...     for _ in range(int(state.step), 3):
      ...         state, info = step(state, jnp.ones(8))
      ...         _ = checkpoints.save(state)
      >>> with fddp.Checkpoints(folder.name, step, every=2) as checkpoints:
      ...     state, _ = checkpoints.restore(step.init(jnp.zeros(())))
      >>> int(state.step)
      2
      >>> folder.cleanup()
    """

    def __init__(self, path: str | PathLike[str], step: TrainStep, *, every: int = 1000, keep: int = 3) -> None:
        """Opens a folder; every rank calls it.

        Args:
          path: the folder, which rank 0 reads and writes. Where a restart may put rank 0 on another host, both must
            see it.
          step: the step whose states are saved.
          every: after how many steps a state is saved.
          keep: how many of the newest to keep.

        Raises:
          ValueError: a number below 1; or, on Gloo and NCCL, the group's rank 0 is not the job's.
          TypeError: `step` is none.
          ModuleNotFoundError: Orbax is not installed.
          RuntimeError: rank 0 cannot open the folder; on every rank.
        """
        if not isinstance(step, TrainStep):
            raise TypeError(f"Checkpoints: step must be a step from fddp.train_step, got {type(step).__name__}.")
        for name, value in (("every", every), ("keep", keep)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Checkpoints: {name} must be a whole number of 1 or more, got {value!r}.")
        self._path = Path(path)
        self._step = step
        self._every = int(every)
        self._keep = int(keep)
        # How many steps came before this object's, and the last number that was saved; None before a state is seen.
        self._before: int | None = None
        self._last = -1
        self._writer = ThreadPoolExecutor(1, "fddp-checkpoints")
        self._writing = Future[Exception | None]()
        self._writing.set_result(None)
        self._manager: Any = None

        def open_folder() -> None:
            if jax.process_index():
                raise ValueError(
                    "rank 0 of the group must be the first process of jax.distributed, which Orbax writes by"
                )
            self._manager = opened(self._path)

        self._on_rank_0(open_folder)

    def save(self, state: TrainState, place: Any = None, *, now: bool = False) -> bool:
        """Saves a state if so many steps have passed since the last time; call it after each step, on every rank.

        The state is copied before this returns, and written while training goes on. A disk that is full is told at
        once, costs none of the older checkpoints, and ends nothing before `close`. While gradients are pending
        (`no_sync`) nothing is due.

        Args:
          state: from the last step.
          place: where the data stands, of rank 0: anything that JSON can hold. `fddp.samples` needs none: it goes on
            at `start_step=int(state.step)`.
          now: whether to save it in any case, before the job ends say (`fddp.preempted`).

        Returns:
          Whether it is being saved.

        Raises:
          TypeError: `place` is nothing that JSON can hold; at the first call, whether or not a state is due.
          ValueError: two leaves have one name, with a key "a/b" beside a key "b" in "a"; likewise.
        """
        if self._before is None:
            # What cannot be saved is told now, not after `every` steps.
            check_names(state)
            json.dumps(place)
            self._before = int(state.step) - self._step.steps
            self._last = int(state.step) - 1
        number = self._before + self._step.steps
        due = number // self._every > self._last // self._every and state.accumulated is None
        if number == self._last or not (due or now):
            return False
        told = {"place": json.loads(json.dumps(place)), "replicas": self._group.size}
        journal = self._group.journal
        self._last = number
        journal.say(f"saving step {number}")
        leaves = whole(self._group, state)
        if self._group.rank == 0:
            self._writing.result()
            self._writing = self._writer.submit(self._write, Saved(number, leaves, told))
        journal.between()
        return True

    def restore(self, state: TrainState) -> tuple[TrainState, Any]:
        """The newest whole checkpoint, or the given state where there is none; every rank calls it.

        Rank 0 names those that are damaged. On another number of replicas what hooks remember starts anew.

        Args:
          state: a new one, from `step.init`: of its form, and on its devices, is what comes back.

        Returns:
          The state; the `place` that was saved with it, or None.

        Raises:
          ValueError: the checkpoint is of another model, optimizer or hook, or has gradients pending that `state` has
            no form for; on every rank.
          RuntimeError: there are checkpoints, but none is whole; on every rank.
        """
        saved = handed_round(self._group, self._on_rank_0(self._newest))
        if saved is None:
            return state, None
        state = laid(self._group, saved, state)
        self._before = saved.number - self._step.steps
        self._last = saved.number
        self._group.journal.goes_on(saved.number)
        return state, saved.told["place"]

    def close(self) -> None:
        """Waits until all is written; every rank calls it.

        Raises:
          RuntimeError: the last checkpoint could not be written; on every rank.
        """
        self._group.journal.say("saving")

        def finish() -> None:
            self._writer.shutdown()
            self._manager.close()
            if error := self._writing.result():
                raise error

        self._on_rank_0(finish)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may be elsewhere
            self._writer.shutdown()

    @property
    def _group(self) -> Group:
        return self._step.group

    def _on_rank_0(self, act: Callable[[], Any]) -> Any:
        """Lets rank 0 act for all; its error is everybody's. Returns what rank 0 finds, and None on the others."""
        mine = act if self._group.rank == 0 else lambda: None
        return verify(self._group, f"checkpoints in {self._path}", mine, nothing_to_compare)

    def _newest(self) -> Saved | None:
        self._writing.result()
        saved, damaged = newest(self._manager)
        if begun := unfinished(self._manager):
            _say(f"checkpoints in {self._path} that were not finished, and count as none: step {begun}.")
        if damaged and saved is None:
            raise RuntimeError(f"none of the checkpoints is whole: {'; '.join(damaged)}; to begin anew move them away.")
        if damaged:
            _say(f"checkpoints in {self._path} that are not whole: {'; '.join(damaged)}.")
        if saved is not None:
            _say(f"training goes on from step {saved.number}, from {self._path}.")
            if (before := saved.told["replicas"]) != self._group.size:
                _say(f"it was on {before} replicas and is on {self._group.size}; what hooks remember starts anew.")
        return saved

    def _write(self, saved: Saved) -> Exception | None:
        try:
            write(self._manager, saved, self._keep)
        except Exception as error:  # training goes on without it, and may have more room the next time
            _say(f"the checkpoint of step {saved.number} could not be written: {type(error).__name__}: {error}")
            return error
        return None


def _say(line: str) -> None:
    with suppress(OSError):  # the disk that is full may be that of stderr
        print(f"fddp: {line}", file=sys.stderr, flush=True)
