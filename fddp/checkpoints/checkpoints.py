"""Saves a training periodically, and resumes it bit for bit from the newest intact checkpoint.

Each rank writes its own arrays on a background thread while training continues, and rank 0 writes
the replicated arrays. If only rank 0 sees the folder, it writes for all ranks, and broadcasts the
arrays that it reads. Checkpoints do not depend on the backend.
"""

import json
import secrets
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from types import TracebackType
from typing import Any

import numpy as np

from fddp.checkpoints.folder import located, met, on_all
from fddp.checkpoints.host_arrays import read_state
from fddp.checkpoints.restoring import newest, report_restored, source
from fddp.checkpoints.saving import copy_part, sweep, write_part
from fddp.checkpoints.state_forms import by_path
from fddp.comm import Group
from fddp.jax_internals import without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.step import TrainState, check_state
from fddp.training import TrainStep
from fddp.wording import check_switch


class Checkpoints:
    """Saves the state of a training periodically, and restores the newest intact checkpoint.

    Every rank creates a `Checkpoints` and makes the same calls. All ranks write and read a sharded
    state, each its own part. If the other ranks do not see the folder, rank 0 writes and reads any
    other state for them. Buffers that are not broadcast are saved from rank 0, as in DDP.

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

    def __init__(
        self, path: str | PathLike[str], step: TrainStep, *, every: int = 1000, keep: int = 3
    ) -> None:
        """Opens a folder; every rank calls it.

        Args:
          path: the folder. Rank 0 must see it, and with `shard` all ranks. If a restart may put
            rank 0 on another host, both hosts must see it. A read-only folder can be restored from.
          step: the step whose states are saved.
          every: the number of steps between two saves.
          keep: the number of newest checkpoints to keep.

        Raises:
          ValueError: `every` or `keep` is below 1; `path` is empty or a URL; or, on every rank, the
            step has `shard` and a rank does not see the folder.
          TypeError: `step` is no `TrainStep`, or `path` is no path.
          ModuleNotFoundError: TensorStore is not installed.
          RuntimeError: rank 0 cannot open the folder; on every rank. A single process raises the
            OSError itself.
        """
        if not isinstance(step, TrainStep):
            raise TypeError(
                f"Checkpoints: step must be a step from fddp.train_step, got {type(step).__name__}."
            )
        for name, value in (("every", every), ("keep", keep)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"Checkpoints: {name} must be a whole number of 1 or more, got {value!r}."
                )
        self._step = step
        self._path = located(path)
        self._every = int(every)
        self._keep = int(keep)
        self._last: int | None = None  # number of the last saved step; None before the first call
        self._seen = 0  # number of the state in the last call of `save`
        self._saves = 0
        self._writer = ThreadPoolExecutor(1, "fddp-checkpoints")
        self._writing = Future[Exception | None]()
        self._writing.set_result(None)
        self._failed = threading.Event()
        self._token = (
            self._group.broadcast(np.frombuffer(secrets.token_bytes(4), np.uint8)).tobytes().hex()
        )
        self._folder = met(self._group, self._path, self._token, step.options.shard)

    @without_context_mesh
    def save(self, state: TrainState, place: Any = None, *, now: bool = False) -> bool:
        """Saves the state at each multiple of `every` steps; every rank calls it after each step.

        The state is copied before this returns, and written while training continues. If the disk
        is full, a message is printed, the older checkpoints stay intact, and only `close` raises.
        No save is due while gradients are pending (`no_sync`).

        Args:
          state: the state that the last step returned.
          place: rank 0's position in the data: any JSON value. `fddp.samples` needs none: it
            resumes with `start_step=int(state.step)`.
          now: True to save even if no save is due, such as before the job ends (`fddp.preempted`).

        Returns:
          True if the state is being saved.

        Raises:
          TypeError: JSON cannot hold `place`; checked at the first call, even if no save is due.
          ValueError: two leaves have the same name, as a key "a/b" and a key "b" inside "a" have;
            checked at the first call, too.
          OSError: the folder cannot be written; on every rank.
        """
        check_state(state)
        refuse_deleted(state.step)
        check_switch("Checkpoints.save: now", now)
        if refusal := self._folder.refusal:
            raise OSError(
                f"Checkpoints: nothing can be saved in {self._path}: {refusal}. Restore from it, "
                "and save with another Checkpoints in a writable folder."
            )
        if self._last is None:
            # A state that cannot be saved is refused at once, not after `every` steps.
            by_path(state)
            _check_place(place)
        number = self._step.training.of(state.step)
        if self._last is None or number < self._seen:  # the script continues an earlier state
            self._last = number - 1
        self._seen = number
        due = number // self._every > self._last // self._every and state.accumulated is None
        if not (due or now):
            return False
        if number == self._last and state.accumulated is None:
            return False
        values = {
            "place": json.loads(json.dumps(place)),
            "replicas": self._group.size,
            "job": self._token,
        }
        journal = self._group.journal
        self._last = number
        self._saves += 1
        journal.say(f"saving step {number}")
        self._writing.result()  # so that memory holds only one copy
        if self._group.rank == 0:  # at a save only: a reader must not remove anything
            self._writer.submit(sweep, self._folder, self._token)
        saved = copy_part(self._folder, number, state, values)
        if self._group.rank in saved.writers:
            # The name is unique: a job that is believed dead may still be writing.
            staging = self._path / f"{number}.begun.{self._token}.{self._saves}"
            self._writing = self._writer.submit(
                write_part, self._folder, staging, saved, self._keep, self._failed.is_set
            )
        journal.between()
        return True

    @without_context_mesh
    def restore(self, state: TrainState) -> tuple[TrainState, Any]:
        """Restores the newest intact checkpoint, if one exists; every rank calls it.

        Rank 0 reports damaged checkpoints. Pending gradients are restored, too. On another number
        of replicas the hooks' memory starts again from `state`.

        Args:
          state: a new state from `step.init`; the restored state has its form and lies on its
            devices. If a checkpoint exists and each replica is one device, the form from
            `step.shapes` is enough.

        Returns:
          The restored state and the `place` saved with it; `state` and None if there is no
          checkpoint.

        Raises:
          ValueError: the checkpoint is of another model, optimizer or hook, or `state` has no form
            for its pending gradients because their metrics are in a class or a replica is several
            devices; on every rank.
          RuntimeError: there are checkpoints, but none is intact; on every rank.
        """
        group = self._group
        on_all(self._folder, lambda: check_state(state))
        checkpoint = newest(self._folder, lambda: self._writing.result())
        if checkpoint is None:
            return state, None
        number, listed = checkpoint
        read = source(self._folder, number, listed)
        state = on_all(self._folder, lambda: read_state(group, number, listed, read, state))
        report_restored(self._folder, number, listed)
        self._last = number
        self._seen = 0
        group.journal.goes_on(number)
        return state, listed.values["place"]

    def close(self) -> None:
        """Waits until the last checkpoint is written; every rank calls it.

        Raises:
          RuntimeError: the last checkpoint could not be written; on every rank. If all ranks have
            the same error, as a single process does, they raise that error.
        """
        self._group.journal.say("saving")

        def finish() -> None:
            self._writer.shutdown()
            if error := self._writing.result():
                raise error

        on_all(self._folder, finish)

    def abandon(self) -> None:
        """Waits for no other rank, after an error: a checkpoint that lacks parts is left out."""
        self._failed.set()
        self._writer.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @property
    def _group(self) -> Group:
        return self._step.group


def _check_place(place: Any) -> None:
    try:
        json.dumps(place)
    except (TypeError, ValueError) as error:
        shown = f"{place!r:.60}"
        raise TypeError(
            f"Checkpoints.save: place must be what JSON can hold, got {shown}: {error}."
        ) from None
