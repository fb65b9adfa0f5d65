"""A training that ended goes on from its newest whole checkpoint, bit for bit.

Each rank writes what it alone holds, on a thread of its own while training goes on, and rank 0 what is equal on all.
Where rank 0 alone sees the folder it writes for all, and hands round what it has read. Nothing depends on the backend.
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
from fddp.checkpoints.host_arrays import laid
from fddp.checkpoints.restoring import newest, report_restored, source
from fddp.checkpoints.saving import sweep, taken, written
from fddp.checkpoints.state_forms import named
from fddp.comm import Group
from fddp.jax_internals import without_context_mesh
from fddp.step import TrainState, check_state
from fddp.training import TrainStep
from fddp.wording import check_switch


class Checkpoints:
    """Checkpoints of a training: saved now and then while it goes on, and the newest whole one to go on from.

    Every rank makes one and calls the same. A state that lies in shards is written and read by all ranks, each its own
    part; any other by rank 0 alone, if the others do not see the folder. Of buffers that are not broadcast rank 0's are
    saved, as in DDP.

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
          path: the folder. With `shard` all ranks must see it, else rank 0. Where a restart may put rank 0 on another
            host, both must see it. From a folder that cannot be written, checkpoints can be restored.
          step: the step whose states are saved.
          every: after how many steps a state is saved.
          keep: how many of the newest to keep.

        Raises:
          ValueError: a number below 1; a path that is empty or a URL; or the step has `shard`, and a rank does not see
            the folder; on every rank.
          TypeError: `step` is none.
          ModuleNotFoundError: TensorStore is not installed.
          RuntimeError: rank 0 cannot open the folder; on every rank. A process that is alone raises the OSError itself.
        """
        if not isinstance(step, TrainStep):
            raise TypeError(f"Checkpoints: step must be a step from fddp.train_step, got {type(step).__name__}.")
        for name, value in (("every", every), ("keep", keep)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Checkpoints: {name} must be a whole number of 1 or more, got {value!r}.")
        self._step = step
        self._path = located(path)
        self._every = int(every)
        self._keep = int(keep)
        self._last: int | None = None  # the number that was saved last; None before a state is seen
        self._saves = 0
        self._writer = ThreadPoolExecutor(1, "fddp-checkpoints")
        self._writing = Future[Exception | None]()
        self._writing.set_result(None)
        self._failed = threading.Event()
        self._token = self._group.broadcast(np.frombuffer(secrets.token_bytes(4), np.uint8)).tobytes().hex()
        self._folder = met(self._group, self._path, self._token, step.options.shard)

    @without_context_mesh
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
          OSError: the folder cannot be written; on every rank.
        """
        check_state(state)
        check_switch("Checkpoints.save: now", now)
        if refusal := self._folder.refusal:
            raise OSError(
                f"Checkpoints: nothing can be saved in {self._path}: {refusal}. Restore from it, and save with another "
                "Checkpoints in a folder that can be written."
            )
        training = self._step.training
        if self._last is None:
            # What cannot be saved is told now, not after `every` steps.
            named(state)
            _check_place(place)
            training.number = int(state.step)
            self._last = training.number - 1
        due = training.number // self._every > self._last // self._every and state.accumulated is None
        if not (due or now):
            return False
        number = int(state.step)
        if now:  # islands that do not wait may have made unequally many steps
            number = int(self._group.all_reduce(np.int64(number), "max"))
        if number == self._last:
            return False
        told = {"place": json.loads(json.dumps(place)), "replicas": self._group.size, "job": self._token}
        journal = self._group.journal
        self._last = number
        self._saves += 1
        journal.say(f"saving step {number}")
        self._writing.result()  # or there would be two copies
        if self._group.rank == 0:  # who only reads removes nothing
            self._writer.submit(sweep, self._folder, self._token)
        saved = taken(self._folder, number, state, told)
        if self._group.rank in saved.writers:
            # No two objects begin to write in one place, be it that one is of a job that was thought dead.
            begun = self._path / f"{number}.begun.{self._token}.{self._saves}"
            self._writing = self._writer.submit(written, self._folder, begun, saved, self._keep, self._failed.is_set)
        journal.between()
        return True

    @without_context_mesh
    def restore(self, state: TrainState) -> tuple[TrainState, Any]:
        """The newest whole checkpoint, or the given state where there is none; every rank calls it.

        Rank 0 names those that are damaged. On another number of replicas what hooks remember starts anew.

        Args:
          state: a new one, from `step.init`: of its form, and on its devices, is what comes back. A form from
            `step.shapes` will do, where a checkpoint exists and replicas are one device each: no first state is made.
            Gradients that were pending are restored, too.

        Returns:
          The state; the `place` that was saved with it, or None.

        Raises:
          ValueError: the checkpoint is of another model, optimizer or hook, or has gradients pending for which
            there is no form, as metrics are in a class or a replica is several devices; on every rank.
          RuntimeError: there are checkpoints, but none is whole; on every rank.
        """
        group = self._group
        on_all(self._folder, lambda: check_state(state))
        found = newest(self._folder, lambda: self._writing.result())
        if found is None:
            return state, None
        number, listed = found
        read = source(self._folder, number, listed)
        state = on_all(self._folder, lambda: laid(group, number, listed, read, state))
        report_restored(self._folder, number, listed)
        self._step.training.number = number
        self._last = number
        group.journal.goes_on(number)
        return state, listed.told["place"]

    def close(self) -> None:
        """Waits until all is written; every rank calls it.

        Raises:
          RuntimeError: the last checkpoint could not be written; on every rank. Where all have the same error, as a
            process that is alone does, they raise that.
        """
        self._group.journal.say("saving")

        def finish() -> None:
            self._writer.shutdown()
            if error := self._writing.result():
                raise error

        on_all(self._folder, finish)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may be elsewhere
            self._failed.set()
            self._writer.shutdown()

    @property
    def _group(self) -> Group:
        return self._step.group


def _check_place(place: Any) -> None:
    try:
        json.dumps(place)
    except (TypeError, ValueError) as error:
        shown = f"{place!r:.60}"
        raise TypeError(f"Checkpoints.save: place must be what JSON can hold, got {shown}: {error}.") from None
