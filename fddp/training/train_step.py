"""The training step: averages gradients over replicas, then updates the parameters.

Source: `DistributedDataParallel` in PyTorch's `distributed.py`; Li et al., "PyTorch Distributed"
(VLDB 2020).
"""

import sys
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from jaxtyping import PyTree

from fddp.comm import Group, verify
from fddp.jax_internals import transformed
from fddp.runtime import group_of
from fddp.step import (
    OptionArguments,
    StepInfo,
    TrainState,
    accumulate_locally,
    check_no_sync,
    check_state,
    compare,
    described_start,
    finished,
    first_form,
    first_state,
    local_form,
    provisional_plan,
    read_start,
    ready,
    refuse_transformations,
    run_inside,
    synchronize,
    with_some_new,
)
from fddp.training.settled_step import SettledStep


class TrainStep(SettledStep):
    """A training step over replicas, from `train_step`."""

    def init(self, params: PyTree, *, model_state: PyTree = None, rng: PyTree = None) -> TrainState:
        """Makes the first state, with rank 0's values, after a comparison of the ranks.

        Args:
          params: tree of arrays. Float and complex leaves are trained, except those to `ignore`.
          model_state: buffers, which the loss takes and returns.
          rng: random key for the loss (`jax.random.key(0)`), or a tree of keys. Replicas draw
            different numbers, but equal ones from a `fddp.Shared` key.

        Returns:
          The state, on the group's devices, without memory shared with the arguments.

        Raises:
          ValueError: no leaf is trained, or ranks differ (also in versions); on every rank.
          TypeError: a leaf is not an array; on every rank.

        Example:
          >>> import fddp, jax, jax.numpy as jnp, optax
          >>> loss = lambda w, x: jnp.mean((x - w) ** 2)
          >>> step = fddp.train_step(loss, optax.adam(0.1), shard="state")
          >>> step.init(jax.random.normal(jax.random.key(0), (4, 3))).params
          Shard of float32[4, 3]
        """
        refuse_transformations()
        replica = self._replica
        setup = replica, self._optimizer
        read = partial(read_start, *setup, params, model_state, rng)
        start = verify(
            self.group, "parameters, options or versions", read, partial(described_start, *setup)
        )
        state = first_state(*setup, start)
        self._expect(
            provisional_plan(replica, start.params), local_form(self.group.placement, state)
        )
        if start.remark:
            self.group.print(f"fddp: {start.remark}", file=sys.stderr)
        return state

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        """Averages the gradients over the rows of all replicas, and updates the state once.

        After the first batch, a step may run inside your program, `jax.lax.scan(step, state,
        batches)`. `batch` then has the rows of all processes (over MPI those of this one), and
        `check_replicas_every` and counters are skipped.

        Args:
          state: from `init` or the last step; donated unless `donate=False`.
          batch: this process's rows: a tree of arrays with equal first dims, divisible by its
            replicas × `accumulation_steps`. All ranks need equally many rows in the first batch,
            but not later: every row has the same weight, unless the loss returns `fddp.Weighted`.
            Other trees are batches too, unchanged or in `fddp.Stacked`.

        Returns:
          The next state; the step's report, with loss and metrics averaged over all rows.

        Raises:
          ValueError: the batch is empty or cannot be divided; at the first batch on every rank.
          RuntimeError: the replicas are no longer equal, on every rank (`check_replicas_every`).
          TypeError: the step cannot run inside your program, or the loss's result is invalid.
        """
        if transformed():
            return run_inside(self._settled, state, batch)
        self._settled, args = ready(self._settled, self._replica, self._use, state, batch)
        self._settled = settled = compare(self._settled, args)
        if not self.steps:  # compared once before step 1, so that an error does not appear late
            self._check(state, 0)
        number = self.training.of(state.step) + 1
        state, info = synchronize(settled, state, args)
        self.steps += 1
        self.training.step, self.training.number = state.step, number
        self.skips.note(self.group, settled.plan, settled.agreed.common.chosen, number, info)
        self._check(state, self.steps)
        return state, info

    def finish(self, state: Any) -> TrainState:
        """Returns a state with all of its sums, after steps with `schedule="eager"`.

        Args:
          state: from a step; a `TrainState` is returned unchanged.

        Returns:
          The state.

        Raises:
          ValueError: a later step has received the sums.

        Example:
          >>> import fddp, jax.numpy as jnp, optax
          >>> loss = lambda w, x: jnp.mean((x - w) ** 2)
          >>> step = fddp.train_step(loss, optax.sgd(0.1), schedule="eager")
          >>> state, info = step(step.init(jnp.zeros(3)), jnp.ones((8, 3)))
          >>> step.finish(state).params.shape
          (3,)
        """
        check_state(state)
        return finished(state)

    def shapes(
        self, params: PyTree, *, model_state: PyTree = None, rng: PyTree = None
    ) -> TrainState:
        """Returns shapes and dtypes of the first state, to compile or to restore a checkpoint.

        Args:
          params: as for `init`, or a tree of `jax.ShapeDtypeStruct`s.
          model_state: as for `init`, or a tree of `jax.ShapeDtypeStruct`s.
          rng: as for `init`, or a tree of `jax.ShapeDtypeStruct`s.

        Returns:
          A state of `jax.ShapeDtypeStruct`s.
        """
        return first_form(self._replica, self._optimizer, params, model_state, rng)

    def no_sync(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepInfo]:
        """Accumulates gradients locally; the next `step(state, batch)` synchronizes all of them.

        Args:
          state: from `init` or the last step. With `shard="state"` the call is collective.
          batch: as for a step.

        Returns:
          The state, with unchanged parameters; loss and metrics of this process's first replica.

        Raises:
          ValueError: with `virtual_replicas`.
        """
        check_no_sync(self._replica)
        state = finished(state)
        self._settled, args = ready(
            self._settled, self._replica, self._use, state, batch, "no_sync"
        )
        state, means = accumulate_locally(self._settled, state, args)
        return state, StepInfo(means.loss, means.aux)

    def on(self, group: Group) -> "TrainStep":
        """Makes the same step for another group.

        Args:
          group: the replicas.

        Returns:
          A separate step, with separate states.
        """
        group = group_of("on", group)
        optimizer = self._optimizer.on(group)
        replica = replace(self._replica, group=group, init=optimizer.init)
        return TrainStep(replica, optimizer, self._use)

    def with_options(self, **options: Unpack[OptionArguments]) -> "TrainStep":
        """Makes the same step with some new options.

        Args:
          **options: fields of `fddp.Options`, except those that change a state's layout: `shard`,
            `virtual_replicas`, and with `shard` also `ignore`.

        Returns:
          A separate step, which its next batch settles. It accepts states of this step, unless the
          hook's state differs, or gradients are pending and `find_unused_parameters` differs.
        """
        replica = replace(self._replica, options=with_some_new(self.options, options))
        return TrainStep(replica, self._optimizer, self._use, self.training)
