"""Saves a training periodically, and resumes it bit for bit from the newest intact checkpoint.

Each rank writes its own arrays on a background thread while training continues, and rank 0 writes
the replicated arrays. If only rank 0 sees the folder, it writes for all ranks, and broadcasts the
arrays that it reads. Checkpoints do not depend on the backend.
"""

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from typing import Any

from fddp.checkpoints.folder import located, met, newest, on_all, remark, report_restored, source
from fddp.checkpoints.saving import copy_part, write_part
from fddp.checkpoints.stored_pieces import (
    LOCAL,
    is_distributed,
    named_leaves,
    read_state,
    stacked_buffers,
    unstacked_buffers,
)
from fddp.comm import verify
from fddp.jax_internals import without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.step import TrainState, check_state, check_step, finished
from fddp.training import TrainStep
from fddp.wording import check_switch, check_whole


class Checkpoints:
    """Saves the state of a training periodically, and restores the newest intact checkpoint.

    Every rank creates a `Checkpoints` and makes the same calls. All ranks write and read a sharded
    state, each its own part. If the other ranks do not see the folder, rank 0 writes and reads any
    other state for them.

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
          RuntimeError: rank 0 cannot open the folder; on every rank. A single process raises the
            OSError itself.
        """
        check_step("Checkpoints", step)
        self._step = step
        self._group = step.group
        # The fields of the state that differ between replicas.
        self._local = [x for x in LOCAL if x != "model_state" or not step.options.broadcast_buffers]
        self._every = check_whole("Checkpoints: every", every, 1)
        self._keep = check_whole("Checkpoints: keep", keep, 1)
        self._last: int | None = None  # number of the last saved step; None before the first call
        self._seen = 0  # number of the state in the last call of `save`
        self._saves = 0
        self._writer = ThreadPoolExecutor(1, "fddp-checkpoints")
        self._writing = Future[Exception | None]()
        self._writing.set_result(None)
        self._failed = threading.Event()
        with self._group.journal.inside("fddp.Checkpoints"):
            self._folder = met(self._group, located(path), step.options.shard)

    @without_context_mesh
    def save(self, state: TrainState, place: Any = None, *, now: bool = False) -> bool:
        """Saves the state at each multiple of `every` steps; every rank calls it after each step.

        The state is copied before this returns, and written while training continues. If the disk
        is full, a message is printed, the older checkpoints stay intact, and only `close` raises.
        Nothing is saved while gradients are pending (`no_sync`).

        Args:
          state: the state that the last step returned.
          place: rank 0's position in the data: any JSON value. `fddp.samples` needs none: it
            resumes with `start_step=int(state.step)`.
          now: True to save even if no save is due, such as before the job ends (`fddp.preempted`).
            While gradients are pending rank 0 prints that nothing is saved.

        Returns:
          True if the state is being saved.

        Raises:
          TypeError: JSON cannot hold `place`; checked at the first call, even if no save is due.
          ValueError: two leaves have the same name, as a key "a/b" and a key "b" inside "a" have;
            checked at the first call, too.
        """
        check_state(state)
        refuse_deleted(state.step)
        check_switch("Checkpoints.save: now", now)
        if self._last is None:
            # A state that cannot be saved is refused at once, not after `every` steps.
            named_leaves(finished(state), ())
            try:
                json.dumps(place)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"Checkpoints.save: place must be what JSON can hold, got {place!r:.60}: "
                    f"{error}."
                ) from None
        number = self._step.training.of(state.step)
        if self._last is None or number < self._seen:  # the script continues an earlier state
            self._last = number - 1
        self._seen = number
        due = now or number // self._every > self._last // self._every
        if not due or number == self._last or state.accumulated is not None:
            if now and state.accumulated is not None and self._group.rank == 0:
                remark(
                    f"nothing is saved at step {number}, because gradients are pending: save after "
                    "the step that synchronizes them."
                )
            return False
        group, folder = self._group, self._folder
        place = json.loads(json.dumps(place))
        values = {"step": number, "replicas": group.size, "place": place}
        state = stacked_buffers(group, finished(state), self._local)
        leaves = named_leaves(state, self._local)
        with group.journal.inside("Checkpoints.save"):
            if any(is_distributed(group, leaf) for leaf in leaves.values()):
                verify(group, "step to save", lambda: number, lambda _: [f"step {number}"])
            self._last = number
            self._saves += 1
            group.journal.say(f"saving step {number}")
            self._writing.result()  # so that memory holds only one copy
            saved = copy_part(folder, leaves, values)
        if group.rank in saved.writers:
            # The name is unique: a job that is believed dead may still be writing.
            staging = folder.path / f"{number}.begun.{folder.token}.{self._saves}"
            self._writing = self._writer.submit(
                write_part, folder, staging, saved, self._keep, self._failed.is_set
            )
        group.journal.between()
        return True

    @without_context_mesh
    def restore(self, state: TrainState) -> tuple[TrainState, Any]:
        """Restores the newest intact checkpoint, if one exists; every rank calls it.

        Rank 0 reports damaged checkpoints. On another number of replicas the hooks' memory, and
        buffers under `broadcast_buffers=False`, are those of `state`; rank 0 says so.

        Args:
          state: a new state from `step.init`; the restored state has its form and lies on its
            devices. If a checkpoint exists and each replica is one device, the form from
            `step.shapes` is enough.

        Returns:
          The restored state and the `place` saved with it; `state` and None if there is no
          checkpoint.

        Raises:
          ValueError: the checkpoint is of another model, optimizer or hook; on every rank.
          RuntimeError: there are checkpoints, but none is intact; on every rank.
        """
        group, folder, local = self._group, self._folder, self._local
        with group.journal.inside("Checkpoints.restore"):
            on_all(folder, lambda: check_state(state))
            checkpoint = newest(folder, lambda: self._writing.result())
            if checkpoint is None:
                return state, None
            number, listed = checkpoint
            read = source(folder, number, listed)
            like = stacked_buffers(group, state._replace(accumulated=None), local)
            state = on_all(folder, lambda: read_state(group, listed, read, like, local))
        report_restored(folder, number, listed, local)
        state = unstacked_buffers(group, state, local)
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

        def finish() -> None:
            self._writer.shutdown()
            if error := self._writing.result():
                raise error

        with self._group.journal.inside("Checkpoints.close"):
            self._group.journal.say("saving")
            on_all(self._folder, finish)

    def abandon(self) -> None:
        """Waits for no other rank, after an error: a checkpoint that lacks parts is left out."""
        self._failed.set()
        self._writer.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
