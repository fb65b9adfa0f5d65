"""A training step over replicas: gradients averaged, then one update of the optimizer.

Source: `DistributedDataParallel` in PyTorch's `distributed.py`; Li et al., "PyTorch Distributed" (VLDB 2020).
"""

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import jax

from fddp.buckets import BucketPlan
from fddp.comm import Group, verify
from fddp.guards import Skips, comparing
from fddp.jax_internals import transformed
from fddp.local_training import as_islands_of
from fddp.measuring import Measurement, Stats, measure, stats
from fddp.optim import LocalSteps, Optimizer
from fddp.runtime import group_of
from fddp.schedules import TaskList, Timeline
from fddp.step import (
    QUORUM,
    OptionArguments,
    Options,
    Replica,
    Settled,
    StepInfo,
    Training,
    TrainState,
    Use,
    accumulate,
    check_no_sync,
    compare,
    described_start,
    first_form,
    first_state,
    held_form,
    inside,
    lower,
    read_start,
    ready,
    synchronize,
    tasks,
    with_some_new,
)


class TrainStep:
    """A training step over replicas; made by `train_step`."""

    def __init__(self, replica: Replica, optimizer: Optimizer, use: Use, training: Training | None = None) -> None:
        self._replica = replica
        self._optimizer = optimizer
        self._use = use
        self._guess: tuple[BucketPlan, TrainState] | None = None
        self._check = comparing(replica.group, replica.options.check_replicas_every)
        self._settled: Settled | None = None
        self.training = training or Training()
        self.steps = 0  # that this object has run
        self.lately = deque[Timeline](maxlen=100)  # when the last of them computed and communicated
        self.skips = Skips()  # those whose gradients were not finite
        self.sent: Any = None  # `StepInfo.sent` of the last of them

    def init(self, params: Any, *, model_state: Any = None, rng: Any = None) -> TrainState:
        """Makes the first state: compared in form on all ranks, then filled with rank 0's values.

        For a model that no replica can hold give a function in place of parameters. It is run leaf by leaf, alike on
        all ranks, and each replica keeps its part of a leaf before the next is made.

        Args:
          params: tree of arrays; those of float or complex dtype are trained, but for those to `ignore`. Or a function
            without arguments that returns one, `lambda: init(key)`: it is traced, as by `jax.jit`, and gives the bits
            that `jax.jit` of it gives. A module that is a pytree of arrays is no function, even if it can be called.
          model_state: buffers that the loss takes and returns, or a function that makes them, or None.
          rng: random key for the loss (`jax.random.key(0)`), or a tree of them, or None; each replica draws its own
            numbers, from a `fddp.Shared` key all the same.

        Returns:
          The state, on the group's devices, in memory of its own.

        Raises:
          ValueError: there is nothing to train, or the ranks differ in parameters, options or versions; on every rank.
          TypeError: a function wants arguments, returns something else than arrays, or cannot be traced; on every rank.

        Example:
          >>> import fddp, jax, jax.numpy as jnp, optax
          >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.adam(0.1), shard="state")
          >>> step.init(lambda: jax.random.normal(jax.random.key(0), (4, 3))).params
          Shard of float32[4, 3]
        """
        replica = self._replica
        given = replica, self._optimizer
        read = partial(read_start, *given, params, model_state, rng)
        start = verify(self.group, "parameters, options or versions", read, partial(described_start, *given))
        state = first_state(*given, start)
        self._expect(replica.provisional_plan(start.params), held_form(self.group.placement, state))
        if start.remark:
            self.group.print(f"fddp: {start.remark}", file=sys.stderr)
        return state

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Trains on a batch: the gradients of all replicas' rows, averaged, then one update.

        Once settled, a fused step may be a part of your program, `jax.lax.scan(step, state, batches)`, but over MPI.
        `batch` then has the rows of all processes, and the host compares (`check_replicas_every`) and counts nothing.

        Args:
          state: from `init` or the last step; its memory is reused unless `donate=False`.
          batch: this process's rows: a tree of arrays with equal first dims, divisible by its replicas ×
            `accumulation_steps`. The first batch has equally many on all ranks; later ones need not: every row weighs
            the same, unless the loss tells its weight (`fddp.Weighted`). Or other trees, as they are or `fddp.Stacked`.

        Returns:
          The next state; loss and metrics averaged over all rows.

        Raises:
          ValueError: rows are missing or cannot be divided; at the first batch on every rank.
          RuntimeError: replicas are no longer equal, on every rank (`check_replicas_every`).
          TypeError: the call cannot be a part of your program, or the loss returns something else than promised.
        """
        if transformed():
            return inside(self._settled, state, batch)
        self._settled, given = ready(self._settled, self._replica, self._use, state, batch)
        self._settled = settled = compare(self._settled, given)
        if not self.steps:  # what is due only now and then is tried before the first step
            self._check(state, 0)
            self.training.number = int(state.step)
        state, info = synchronize(settled, state, given)
        self.steps += 1
        self.training.number += 1
        self.sent = info.sent
        self.skips.note(self.group, settled.plan, settled.chosen, self.training.number, info)
        if settled.runner.timeline is not None and self.steps > 1:  # the first compiles
            self.lately.append(settled.runner.timeline())
        self._check(state, self.training.number)
        return state, info

    def shapes(self, params: Any, *, model_state: Any = None, rng: Any = None) -> TrainState:
        """The form of the state that `init` makes, to compile for or to restore a checkpoint into; nothing is computed.

        Args:
          params: as for `init`, also a function; `jax.ShapeDtypeStruct`s will do.
          model_state: likewise.
          rng: likewise.

        Returns:
          A state of `jax.ShapeDtypeStruct`s.
        """
        return first_form(self._replica, self._optimizer, params, model_state, rng)

    def no_sync(self, state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Adds a batch's gradients locally and sends none; the next `step(state, batch)` synchronizes the lot.

        Args:
          state: from `init` or the last step. With `shard="state"` its parameters are gathered: every rank has to call.
          batch: as for a step.

        Returns:
          The state, its parameters unchanged; loss and metrics of this process's rows (of its first replica).

        Raises:
          ValueError: with `virtual_replicas`.
        """
        check_no_sync(self._replica)
        self._settled, given = ready(self._settled, self._replica, self._use, state, batch, "no_sync")
        state, means = accumulate(self._settled, state, given)
        return state, StepInfo(means.loss, means.aux)

    def timeline(self) -> Timeline:
        """The times at which the last step computed and communicated.

        Raises:
          ValueError: the step is one program (schedule "fused"), inside which only a profiler can see.
        """
        timeline = self.settled.runner.timeline
        if timeline is None:
            raise ValueError("a fused step is one program; a step with a timeline has another schedule: 'staged', say.")
        return timeline()

    def measure(self, state: TrainState, batches: Iterable[Any]) -> Measurement:
        """`fddp.measure(step, state, batches)`: runs a step on each batch and tells where the time went.

        Args:
          state: from `init` or the last step.
          batches: as for steps; equally many on every rank.

        Returns:
          The measurement.
        """
        return measure(self, state, batches)

    def stats(self) -> Stats:
        """`fddp.stats(step)`: what this step is and how its last runs went, as DDP logs it."""
        return stats(self)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lowers the step, as `jax.jit(f).lower` does, for a look at what XLA makes of it.

        Args:
          state: as for a step.
          batch: as for a step.

        Returns:
          The lowered program; `.compile().as_text()` is what runs.

        Raises:
          ValueError: the schedule runs several programs.
        """
        self._settled, given = ready(self._settled, self._replica, self._use, state, batch)
        return lower(self._settled, given)

    def tasks(self, state: TrainState, batch: Any) -> TaskList:
        """The tasks that a step launches: computing, messages, and what each of them waits for.

        Args:
          state: as for a step; `jax.ShapeDtypeStruct`s will do, from `shapes`.
          batch: likewise.

        Returns:
          The list; `print(it)` is a table. Nothing is compiled or run.
        """
        self._settled, given = ready(self._settled, self._replica, self._use, state, batch)
        return tasks(self._settled, state, given)

    def on(self, group: Group) -> "TrainStep":
        """The same step for other replicas.

        Args:
          group: the replicas; where it has no nodes they get nodes as these have, if they can (ValueError).

        Returns:
          A step of its own; states are not shared.
        """
        group = as_islands_of(self.group, group_of("on", group), self._optimizer)
        return TrainStep(replace(self._replica, group=group), self._optimizer, self._use)

    def with_options(self, **options: Unpack[OptionArguments]) -> "TrainStep":
        """The same step with some options new: schedule, buckets, hook. It goes on from a state of this one.

        Args:
          **options: fields of `fddp.Options`, except the form of a state: `shard`, `virtual_replicas`, `ignore`.

        Returns:
          A step of its own, which its next batch settles.
        """
        replica = replace(self._replica, options=with_some_new(self.options, options))
        return TrainStep(replica, self._optimizer, self._use, self.training)

    def __repr__(self) -> str:
        known = self._settled
        how = f"schedule={known.schedule!r}, {known.plan.summary}" if known else "to be settled by the first batch"
        late = ", islands do not wait: not the mathematics of one replica" if QUORUM in self._replica.asked else ""
        return f"TrainStep({self._replica.loss}, size={self.group.size}, backend={self.group.backend!r}, {how}{late})"

    @property
    def group(self) -> Group:
        """The replicas."""
        return self._replica.group

    @property
    def optimizer(self) -> Any:
        """The optax transformation; with `fddp.local_steps` the one that each replica trains with alone."""
        return self._optimizer.inner if isinstance(self._optimizer, LocalSteps) else self._optimizer

    @property
    def options(self) -> Options:
        """The options of bucketing, accumulating and sending."""
        return self._replica.options

    @property
    def plan(self) -> BucketPlan:
        """The buckets of one device, once a state exists: DDP's guess until a batch shows the order of readiness."""
        return self._settled.plan if self._settled else self._guessed[0]

    @property
    def held(self) -> TrainState:
        """The form of what one replica holds of a state; with what is pending, once a call was given some."""
        return self._settled.held if self._settled else self._guessed[1]

    @property
    def settled(self) -> Settled:
        """Its plan and its programs, which the first batch settles."""
        if self._settled is None:
            raise ValueError("there is no program yet: the first batch settles it.")
        return self._settled

    @property
    def _guessed(self) -> tuple[BucketPlan, TrainState]:
        if self._guess is None:
            raise ValueError("a plan exists once a state does: call step.init(params) first.")
        return self._guess

    def _expect(self, guess: BucketPlan, held: TrainState) -> None:
        """Prepares for parameters of this form; what was settled for another form is forgotten."""
        if self._settled and (self.plan.leaves, self.plan.treedef) != (guess.leaves, guess.treedef):
            self._settled = None
        self._guess = guess, held
