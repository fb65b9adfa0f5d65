"""A training that repeats a step after the loss of a rank.

A step is pure: it returns a new state or raises. The state before it is not donated, so the
remaining ranks form a new group, make the step again for it, and run it on that state.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import is_shard
from fddp.checkpoints import Checkpoints
from fddp.checkpoints.files import Index, Listed
from fddp.checkpoints.stored_pieces import named_leaves, read_state
from fddp.comm import Group
from fddp.elastic.job import REASON_S, current_job
from fddp.jax_internals import rows_here
from fddp.runtime.watching import from_transport
from fddp.step import StepInfo, TrainState
from fddp.training import TrainStep
from fddp.training.local_steps import LocalState


class ElasticStats(NamedTuple):
    """The cost of surviving a rank; see `Trainer.stats`."""

    group: int
    """Number of the group, from 1: each change of ranks makes another one."""
    ranks: tuple[int, ...]
    """The launcher's ranks that are present."""
    regroup_s: float | None
    """Seconds of this rank's last regrouping, without the repeated step; None before the first."""


class Trainer:
    """A training step and its state, on the ranks that are present."""

    def __init__(
        self,
        make: Callable[[Group], TrainStep],
        params: PyTree,
        *,
        model_state: PyTree = None,
        rng: PyTree = None,
        checkpoints: Callable[[TrainStep], Checkpoints] | None = None,
    ) -> None:
        """Makes the first state, or takes over the state of the ranks that already train.

        Args:
          make: makes the step for a group: `lambda group: fddp.train_step(loss, optimizer,
            group=group)`, with `donate=False` in any case. It is called again for each new group.
            Arrays that the loss uses must be made inside of it, or be NumPy arrays: those of JAX
            end with their group.
          params: as for `TrainStep.init`.
          model_state: as for `TrainStep.init`.
          rng: as for `TrainStep.init`.
          checkpoints: opens a folder for a step: `lambda step: fddp.Checkpoints("run", step)`. A
            job restores the newest checkpoint when it starts, and saves each that is due. It is
            called again for each new group.

        Raises:
          ValueError: the job was not started by `fddp.init(elastic=True)`, or the step has
            `shard=` or `fddp.local_steps`.
        """
        self._job = current_job()
        self._make = make
        self._open = checkpoints
        self._checkpoints: Checkpoints | None = None
        self._start: Any = jax.device_get((params, model_state, rng))
        self._state: TrainState | None = None
        self._held_state: HeldState | None = None  # while there is no group
        self._regroup_s: float | None = None
        self._form()

    @property
    def group(self) -> Group:
        """The ranks that are present."""
        return self._job.group

    @property
    def number(self) -> int:
        """Steps done."""
        return int(self.state.step)

    @property
    def state(self) -> TrainState:
        """The state after `number` steps."""
        if self._state is None:
            raise RuntimeError("the ranks are changing, and have no state now.")
        return self._state

    def step(self, rows: PyTree | Callable[[Group], PyTree]) -> StepInfo:
        """Runs the next step, again if the ranks change meanwhile.

        Args:
          rows: this rank's batch, or a function of the group that returns it, which deals the rows
            again when the ranks change.

        Returns:
          The report of the step. `group.size` is the number of replicas that it had.

        Raises:
          NoQuorum: too few ranks remain.
          Excluded: the other ranks go on without this one.
        """
        while True:
            if self._job.membership.regroups():
                self._regroup()
            try:
                batch = rows(self.group) if callable(rows) else rows
                with self._job.membership.signs.inside(self.number):
                    after, info = jax.block_until_ready(self._step(self.state, batch))
                    if self._checkpoints:
                        self._checkpoints.save(after)
            except Exception as error:
                if not (from_transport(error) and self._job.membership.regroups(REASON_S)):
                    raise
                continue
            self._state = after
            return info

    def stats(self) -> ElasticStats:
        """Returns the number of the group, its ranks, and the time of the last regrouping."""
        ranks = tuple(member.order for member in self._job.view.members)
        return ElasticStats(self._job.view.epoch, ranks, self._regroup_s)

    def _regroup(self) -> None:
        """Holds the state on the host, until a new group has it."""
        begin = time.monotonic()
        if self._state is not None:
            self._held_state = to_host(self._job.view.epoch, self._state)
        self._state = None
        self._leave_group()
        self._form()
        self._regroup_s = time.monotonic() - begin

    def _form(self) -> None:
        """Makes step and state for the group; again if it changes meanwhile."""
        while self._state is None:
            try:
                self._step, self._state = self._formed()
            except Exception as error:
                if not (from_transport(error) and self._job.membership.regroups(REASON_S)):
                    raise
                self._leave_group()
        self._held_state = None

    def _leave_group(self) -> None:
        """Waits for the next group; the checkpoints belong to the earlier one."""
        if self._checkpoints:
            self._checkpoints.abandon()
        self._job.regroup()

    def _formed(self) -> tuple[TrainStep, TrainState]:
        params, model_state, rng = self._start
        step = self._make(self.group).with_options(donate=False)
        state = step.shapes(params, model_state=model_state, rng=rng)
        _refuse_local_state(state)
        newest = newest_state(self.group, self._held_state)
        if newest is None or jax.tree.leaves(state.hook_state):
            state = step.init(params, model_state=model_state, rng=rng)
        self._checkpoints = self._open(step) if self._open else None
        if newest is not None:
            state = jax.block_until_ready(to_devices(self.group, newest, state))
        elif self._checkpoints:
            state, _ = self._checkpoints.restore(state)
        return step, state


def _refuse_local_state(state: TrainState) -> None:
    option = ""
    if any(is_shard(x) for x in jax.tree.leaves(state, is_leaf=is_shard)):
        option = "shard="
    if isinstance(state.opt_state, LocalState):  # its replicas differ, too
        option = "fddp.local_steps"
    if option:
        raise ValueError(
            f"fddp.elastic.Trainer cannot train with {option}: a part of the state of a lost rank "
            "exists nowhere else. Leave it out, or start the job without elastic=True by "
            "`python -m fddp run --restarts 3`, and save checkpoints."
        )


### The state of a training as host arrays, which outlive the devices of a view

IN_GROUP = ("hook_state", "accumulated")
"""The fields of a state that end with a group."""


class HeldState(NamedTuple):
    """A member's state after some steps."""

    version: tuple[int, int]
    """Steps done, and the epoch of the view that did the last one."""
    leaves: Mapping[str, np.ndarray]
    """Name of a leaf → its values."""


def to_host(epoch: int, state: TrainState) -> HeldState:
    """Copies a state to the host, without the memory of hooks, which starts again in each group."""
    leaves = named_leaves(state._replace(**dict.fromkeys(IN_GROUP)), ())
    arrays = {name: np.array(rows_here(leaf.x)) for name, leaf in leaves.items()}
    return HeldState((int(state.step), epoch), arrays)


def newest_state(group: Group, local: HeldState | None) -> HeldState | None:
    """Returns the newest state of all members, or None without one; every member calls it."""
    versions = group.all_gather_object(local and local.version)
    newest = max(filter(None, versions), default=None)
    if newest is None or all(version == newest for version in versions):
        return local
    root = versions.index(newest)
    leaves = local.leaves if local and local.version == newest else {}
    forms = group.broadcast_object({name: (x.shape, x.dtype) for name, x in leaves.items()}, root)
    received = {
        name: group.broadcast(leaves.get(name, np.zeros(*form)), root)
        for name, form in forms.items()
    }
    return HeldState(newest, received)


def to_devices(group: Group, held_state: HeldState, like: TrainState) -> TrainState:
    """Puts a state on the group's devices, with the hooks' memory of `like`."""

    def read(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        return held_state.leaves[name].reshape(dims)[place]

    forms = {name: (str(x.dtype), x.shape, x.shape) for name, x in held_state.leaves.items()}
    listed = Listed({"step": held_state.version[0], "replicas": -1}, forms, {})
    return read_state(group, listed, read, like, IN_GROUP)
