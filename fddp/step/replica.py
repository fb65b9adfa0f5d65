"""One replica's part of a step: pure functions of (state, pending sums, rows).

They accumulate contributions, pack them into messages, and divide the received sums.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fddp.buckets import BucketPlan, Messages
from fddp.comm import Group, add_replica_dim, drop_replica_dim
from fddp.hooks import Reduction, per_device, reductions
from fddp.jaxpr import differentiable
from fddp.losses import Objective, Pending, Sums, contribute, folded, in_unit, mean, plus
from fddp.losses import accumulate as in_micro_batches
from fddp.optim import scale_of, scaled
from fddp.step.buffers import land_buffers, send_buffers
from fddp.step.combinations import AXES, refuse
from fddp.step.first_trace import FirstTrace
from fddp.step.options import Options
from fddp.step.state import Mean, TrainState
from fddp.wording import leaf_names

if TYPE_CHECKING:  # the methods of a `Strategy` take a `Replica`
    from fddp.step.strategy import Strategy

# (gradients, tail) → messages; their sums → (gradients, None for leaves outside the plan; tail)
Pack: TypeAlias = Callable[[Any, Any], Messages]
Unpack: TypeAlias = Callable[[Messages], tuple[list[Any], Any]]


@dataclass(frozen=True)
class Replica:
    """A step from the point of view of one replica."""

    objective: Objective
    """The loss."""
    group: Group
    """The replicas."""
    options: Options
    """Options of buckets, accumulation and communication."""
    strategy: "Strategy"
    """How replicas hold a state and compute a step."""
    init: Callable[[Any], Any] | None = None
    """Trained parameters → optimizer state; None without an optimizer."""
    unit: int | None = None
    """Rows of a micro-batch of the first batch. They weigh 1 if the loss returns no weight."""
    first: FirstTrace | None = None
    """A step evaluates this trace again, so that the loss is traced once."""
    loss: str = "loss_fn"
    """The user's name for the loss."""

    def __post_init__(self) -> None:
        refuse(self.features)
        if self.replicas % self.group.size:
            fit = self.replicas + -self.replicas % self.group.size
            raise ValueError(
                "virtual_replicas must be a multiple of the number of replicas, "
                f"{self.group.size}, got {self.replicas}: all replicas compute the same number. "
                f"Give {fit}, or train on fewer."
            )

    @cached_property
    def features(self) -> dict[str, str]:
        """The features of its step: name in `combinations` → text for an error message."""
        axes = ", ".join(map(repr, self.group.placement.other_axes))
        features = dict(self.options.features)
        if axes:
            features[AXES] = f"{AXES}, along {axes}"
        return features | {self.strategy.name: self.strategy.name}

    def local(
        self, pack: Pack, state: TrainState, pending: Pending | None, rows: PyTree
    ) -> tuple[Messages, Any]:
        """Returns this replica's messages, and the values to save for `mean`."""
        grads, pending, broken = self.gradients(
            state, pending, rows, self.options.accumulation_steps
        )
        tail, saved = self.tail(pending, rows)
        return pack(grads, tail), (saved, broken)

    def gradients(
        self, state: TrainState, pending: Pending | None, rows: PyTree, micro_batches: int
    ) -> tuple[Any, Pending, Array | None]:
        """Adds rows to the pending sums; returns (gradients, other sums, non-finite marks)."""
        _, pending = self._accumulated(state, pending, rows, micro_batches)
        local_grads = pending.sums.grads
        # The last place where this replica's own gradients are visible: then they are summed.
        broken = None
        if self.options.skip_nonfinite:
            broken = jnp.stack([~jnp.all(jnp.isfinite(x)) for x in local_grads])
        grads = _tree(jax.tree.structure(state.params), self.chosen(state.params), local_grads)
        return grads, pending._replace(sums=pending.sums._replace(grads=())), broken

    def tail(self, pending: Pending, rows: PyTree) -> tuple[Any, Any]:
        """Returns the values to send after the gradients, and the buffers to save for `mean`."""
        option, comm = self.options.broadcast_buffers, self.group.communicator
        buffers, saved = send_buffers(option, comm, pending.model_state, rows)
        return (pending.sums.used, pending.sums._replace(used=None), buffers), saved

    @property
    def replicas(self) -> int:
        """Number of replicas that share the rows."""
        return self.strategy.replicas or self.group.size

    @property
    def plain(self) -> bool:
        """True if its messages are plain sums of gradients, each on one device."""
        return self.options.hook is None and not self.group.placement.other_axes

    def reductions(self, plan: BucketPlan) -> tuple[Reduction, ...]:
        """Makes the reduction of each message, for each device of a replica separately."""
        sums = reductions(plan, self.options.hook)
        return tuple(per_device(self.group.placement, reduction) for reduction in sums)

    def mean(
        self,
        plan: BucketPlan,
        unpack: Unpack,
        state: TrainState,
        messages: Messages,
        saved: PyTree,
        nbytes: Array,
    ) -> Mean:
        """Divides the sums over replicas by their weight."""
        received, (used, sums, buffers) = unpack(messages)
        chosen = self.chosen(state.params)
        params = jax.tree.leaves(state.params)
        # Leaves outside the plan have a gradient of zero.
        grads = [jnp.zeros_like(params[i]) if received[i] is None else received[i] for i in chosen]
        means = mean(sums._replace(grads=grads))
        saved, broken = saved
        option, comm = self.options.broadcast_buffers, self.group.communicator
        model_state = land_buffers(option, comm, state.model_state, buffers, saved)
        if used is not None:
            used = _tree(plan.treedef, chosen, list(used.astype(jnp.int32)))
        grads = _tree(plan.treedef, chosen, means.grads)
        # A separate message of the scalars is the last.
        buckets = [math.inf if x.bucket is None else x.bucket for x in plan.messages]
        sent = nbytes[np.argsort(buckets)]
        return Mean(grads, means.loss, means.aux, model_state, sent, used, broken, sums.weight)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in this process's batch."""
        return self.replicas // self.group.processes * self.options.accumulation_steps

    def accumulate(
        self, state: TrainState, pending: Pending | None, rows: PyTree
    ) -> tuple[Pending, Sums]:
        """Adds rows to the pending sums; also returns the mean loss and aux of these rows."""
        count = self.options.accumulation_steps
        sums, pending = self._accumulated(state, drop_replica_dim(pending), rows, count)
        return add_replica_dim(pending), mean(sums._replace(grads=()))

    def chosen(self, params: PyTree) -> tuple[int, ...]:
        """Indices of the trained leaves: differentiable, and not ignored."""
        names = leaf_names(params)
        ignore = self.options.ignore or (lambda name: False)
        return tuple(i for i in differentiable(jax.tree.leaves(params)) if not ignore(names[i]))

    def trained(self, params: PyTree) -> Any:
        """Replaces the leaves that are not trained by None."""
        leaves, treedef = jax.tree.flatten(params)
        chosen = set(self.chosen(params))
        return treedef.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])

    def _accumulated(
        self, state: TrainState, pending: Pending | None, rows: PyTree, micro_batches: int
    ) -> tuple[Sums, Pending]:
        """Returns the sums of this replica's rows, and all sums that are pending with them."""
        before = no_sums(state) if pending is None else pending
        unscaled = isinstance(scale_of(state.opt_state), int)
        known = self.first if pending is None and micro_batches == 1 and unscaled else None

        def add(pending: Pending, micro_batch: PyTree) -> Pending:
            if known and (after := known.again(state, micro_batch)):
                return after
            objective, *arguments = self.arguments(state, pending, micro_batch)
            objective = scaled(objective, state.opt_state)
            find_unused = self.options.find_unused_parameters
            return contribute(objective, *arguments, find_unused=find_unused)

        after = in_micro_batches(add, before._replace(sums=None), rows, micro_batches)
        return after.sums, after._replace(sums=plus(in_unit(before, after.unit), after.sums))

    def arguments(
        self, state: TrainState, pending: Pending, micro_batch: PyTree
    ) -> tuple[Any, ...]:
        """Returns the arguments of `contribute` for one micro-batch."""
        objective = partial(self.objective, unit=self.unit)
        # The random keys of the micro-batch.
        index = self.group.communicator.replica_index()
        key = folded(state.rng, state.step, pending.micro_batches, index)
        return objective, self.chosen(state.params), state.params, pending, key, micro_batch


def no_sums(state: TrainState) -> Pending:
    """Makes the pending sums of a replica before its first micro-batch."""
    return Pending(None, state.model_state, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))


def _tree(treedef: Any, chosen: Sequence[int], grads: Sequence[Array]) -> Any:
    """Arranges gradients like the parameters, with None for leaves that are not trained."""
    grad_of = dict(zip(chosen, grads))
    return treedef.unflatten([grad_of.get(i) for i in range(treedef.num_leaves)])
