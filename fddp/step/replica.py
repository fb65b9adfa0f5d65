"""One replica's part of a step: pure functions of (state, what is pending, rows), for schedules to launch.

It gathers contributions, packs them into messages, and when the sums come back it divides and uses them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fddp.buckets import (
    BucketPlan,
    Messages,
    Travelling,
    cut_in_layers,
    described_groups,
    fill_buckets,
    fill_rounds,
    place_scalars,
    plan_with_slices,
)
from fddp.comm import Group, add_replica_dim, device_parts, drop_replica_dim
from fddp.hooks import Reduction, on_each_device, reductions
from fddp.jaxpr import differentiable
from fddp.losses import Objective, Pending, Sums, contribute, folded, in_unit, mean, plus, reached
from fddp.losses import accumulate as in_micro_batches
from fddp.optim import scaled
from fddp.schedules import by_bucket
from fddp.step.buffers import Buffers, average, broadcast, keep
from fddp.step.combinations import AXES, refuse
from fddp.step.options import Options
from fddp.step.state import Mean, TrainState
from fddp.wording import leaf_name

if TYPE_CHECKING:  # a way says what replicas do
    from fddp.step.way import Way

# (gradients, tail) -> messages; what came back -> (gradients, None for leaves that did not travel; tail)
Pack: TypeAlias = Callable[[Any, Any], Messages]
Unpack: TypeAlias = Callable[[Messages], tuple[list[Any], Any]]


@dataclass(frozen=True)
class Replica:
    """A step, from one replica's point of view."""

    objective: Objective
    """The loss."""
    group: Group
    """The replicas."""
    options: Options
    """Options of bucketing, accumulating and sending."""
    way: "Way"
    """The way in which replicas hold a state and make a step of it."""
    unit: int | None = None
    """Rows of a micro-batch of the first batch: so many weigh 1, where the loss tells no weight of its own."""
    loss: str = "loss_fn"
    """The user's name for the loss."""

    def __post_init__(self) -> None:
        refuse(self.asked)
        if self.replicas % self.group.size:
            fit = self.replicas + -self.replicas % self.group.size
            raise ValueError(
                f"virtual_replicas must be a multiple of the number of replicas, {self.group.size}, got "
                f"{self.replicas}: each stands for equally many. Give {fit}, or train on fewer."
            )

    @cached_property
    def asked(self) -> dict[str, str]:
        """The features that its step has, by their names in `combinations`, and how each was given."""
        axes = ", ".join(map(repr, self.group.placement.other_axes))
        asked = self.options.asked | ({AXES: f"{AXES}, along {axes}"} if axes else {})
        return asked | {name: name for name in (self.way.name, *self.way.more)}

    def local(self, pack: Pack, state: TrainState, pending: Pending | None, rows: Any) -> tuple[Messages, Any]:
        """Makes the messages of this replica, and what it keeps for itself."""
        grads, pending, broken = self.gradients(state, pending, rows, self.options.accumulation_steps)
        tail, kept = self.tail(pending, rows)
        return pack(grads, tail), add_replica_dim((kept, broken))

    def gradients(
        self, state: TrainState, pending: Pending | None, rows: Any, micro_batches: int
    ) -> tuple[Any, Pending, Array | None]:
        """The gradients of all that is pending when these rows are added, the rest of it, and which are not finite."""
        _, pending = self._gather(state, pending, rows, micro_batches)
        own = pending.sums.grads
        # Each replica's own gradients are seen here for the last time.
        broken = _broken(own) if self.options.skip_nonfinite else None
        grads = _tree(jax.tree.structure(state.params), self.chosen(state.params), own)
        return grads, pending._replace(sums=pending.sums._replace(grads=())), broken

    def tail(self, pending: Pending, rows: Any) -> tuple[Any, Any]:
        """Values that travel behind gradients, and the buffers that this replica keeps."""
        sent, kept = self.buffers.send(self.group.communicator, pending.model_state, rows)
        # What is used comes first: by it a reduction knows whether a bucket needs to be sent.
        return (pending.sums.used, pending.sums._replace(used=None), sent), kept

    @property
    def replicas(self) -> int:
        """The number of replicas among which rows are divided."""
        return self.way.replicas or self.group.size

    @property
    def buffers(self) -> Buffers:
        """The rule for the model state."""
        return {True: broadcast, "mean": average, False: keep}[self.options.broadcast_buffers]()

    def reductions(self, plan: BucketPlan, params: Any) -> tuple[Reduction, ...]:
        """The sums of the messages over replicas, of which each device of a replica has its own."""
        asks_first = self.options.skip_all_reduce_unused_params
        sums = reductions(plan, self.options.hook, self.chosen(params) if asks_first else None, self.group.size)
        return tuple(on_each_device(self.group.placement, one) for one in sums)

    def mean(
        self, plan: BucketPlan, unpack: Unpack, state: TrainState, messages: Messages, kept: Any, sent: Any
    ) -> Mean:
        """Divides the sums over all replicas into what they have in common."""
        came, (used, sums, buffers) = unpack(messages)
        chosen = self.chosen(state.params)
        params = jax.tree.leaves(state.params)
        # What did not travel has a gradient of zero.
        grads = [jnp.zeros_like(params[i]) if came[i] is None else came[i] for i in chosen]
        means = mean(sums._replace(grads=grads))
        kept, broken = kept
        model_state = self.buffers.land(self.group.communicator, state.model_state, buffers, kept)
        used = None if used is None else _tree(plan.treedef, chosen, list(used.astype(jnp.int32)))
        grads = _tree(plan.treedef, chosen, means.grads)
        broken = drop_replica_dim(broken)
        return Mean(grads, means.loss, means.aux, model_state, by_bucket(plan, sent), used, broken, sums.weight)

    def plan(
        self,
        params: Any,
        order: Sequence[Travelling],
        *,
        dtype: Any = np.float32,
        touched: Mapping[int, int] | None = None,
    ) -> BucketPlan:
        """The buckets of what is trained, in this order; leaves without elements have nothing to send."""
        leaves = jax.tree.leaves(params)
        order = [one for one in order if np.size(leaves[one.leaf])]
        few = (touched or {}) if self._apart else {}
        tree = device_parts(self.group.placement, params)
        plan = plan_with_slices(tree, few, self.group.size, order=order, **self.options.bucketing)
        plan = replace(plan, parts=self.group.parts if self.way.scattered else 1)
        return place_scalars(plan, dtype, early=True, exact=self._exact)

    def slices(self, params: Any, loops: Mapping[int, tuple[int, int]]) -> dict[int, list[Travelling]]:
        """The slices of leaves whose gradients a loop makes, by leaf: (the loop's number, its rounds)."""
        hook = self.options.hook
        # Where buckets are scattered a hook that does not scatter is given whole leaves.
        by_element = hook is None or (hook.by_element and not (self.way.scattered and self.scatter is None))
        if not (by_element and self._summed and self.way.slices):
            return {}
        loops = cut_in_layers(params, loops, self.group.parts) if self.way.scattered else loops
        return fill_buckets(params, loops, **self.options.bucketing)

    @property
    def scatter(self) -> Any:
        """The hook's way to scatter a sum; None: there is none, or nodes would have to sum parts on."""
        hook = self.options.hook
        return hook.scatter if hook and self.group.communicator.levels is None else None

    def rounds(
        self, params: Any, loops: Mapping[int, tuple[int, int]], places: Mapping[int, int]
    ) -> dict[int, list[Travelling]]:
        """The leaves that are summed in the loops that make them: of each its loop, and the place where it is ready."""
        alone = self._summed and self.options.hook is None and self.group.communicator.levels is None
        by_rows = alone if self.way.scattered else self._apart
        # What is gathered layer by layer is scattered so, too: nothing else saves memory.
        places = {} if self.options.reshard_after_forward else places
        loops = cut_in_layers(params, loops, self.group.parts) if self.way.scattered else loops
        return fill_rounds(params, loops, places, **self.options.bucketing) if by_rows else {}

    @property
    def _exact(self) -> bool:
        """Whether messages come back as sums of what was sent."""
        options = self.options
        return options.hook is None and self.way.sums and not options.skip_all_reduce_unused_params

    @property
    def _apart(self) -> bool:
        """Whether rows of a gradient may travel by themselves: each gradient is whole, and only summed."""
        return self._exact and self._summed and self.way.table_rows

    @property
    def _summed(self) -> bool:
        """Whether each gradient is one device's, and travels in every step to be summed, by a hook or plainly."""
        return not (self.group.placement.other_axes or self.options.skip_all_reduce_unused_params)

    def remembered(self, params: Any) -> Any:
        """The first memory of one replica's hook: for each trained leaf, in a tree like the parameters."""
        if self.options.hook is None:
            return ()
        forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.trained(params))
        memory = self.way.remembers(self, self.options.hook, forms)
        return add_replica_dim(memory) if jax.tree.leaves(memory) else ()

    def memory_form(self, params: Any) -> Any:
        """The memory of all replicas' hooks, as shapes."""
        share = self.group.placement.replicas_in_array
        forms = jax.eval_shape(self.remembered, params)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((share, *x.shape[1:]), x.dtype), forms)

    def described_groups(self, params: Any) -> list[str]:
        """Lines that tell which trained leaves are to travel together, to be compared."""
        names = _names(params)
        return described_groups([names[i] for i in self.chosen(params)], self.options.groups)

    def provisional_plan(self, params: Any) -> BucketPlan:
        """DDP's guess, the reverse of the leaves, until a batch shows the order of readiness."""
        return self.plan(params, [Travelling(i) for i in self.chosen(params)[::-1]])

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in this process's batch."""
        return self.replicas // self.group.processes * self.options.accumulation_steps

    def accumulate(self, state: TrainState, pending: Pending | None, rows: Any) -> tuple[Pending, Sums]:
        """Adds these rows to what is pending; also returns their own mean loss and aux."""
        sums, pending = self._gather(state, pending, rows, self.options.accumulation_steps)
        return add_replica_dim(pending), mean(sums._replace(grads=()))

    def contribution(self, state: TrainState, part: Any) -> Sums:
        """The contribution of one micro-batch."""
        return contribute(*self._given(state, part)).sums

    def paths(self, state: TrainState, part: Any) -> tuple[bool, ...]:
        """Marks the trained leaves that have a path to the loss of one micro-batch; all of them, where nobody asks."""
        asked = self.options.find_unused_parameters
        return reached(*self._given(state, part)) if asked else (True,) * len(self.chosen(state.params))

    def _given(self, state: TrainState, part: Any) -> tuple[Any, ...]:
        start = _start(state)
        objective = partial(self.objective, unit=self.unit)
        return objective, self.chosen(state.params), state.params, start, self._key(state, start), part

    def chosen(self, params: Any) -> tuple[int, ...]:
        """Numbers of the leaves that are trained: they can have a gradient and are not to be ignored."""
        names = _names(params)
        ignore = self.options.ignore or (lambda name: False)
        return tuple(i for i in differentiable(jax.tree.leaves(params)) if not ignore(names[i]))

    def trained(self, params: Any) -> Any:
        """The tree with None in place of leaves that are not trained."""
        leaves, treedef = jax.tree.flatten(params)
        chosen = set(self.chosen(params))
        return treedef.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])

    def _gather(
        self, state: TrainState, pending: Pending | None, rows: Any, micro_batches: int
    ) -> tuple[Sums, Pending]:
        """Contributions of this replica's rows, and everything that is now pending."""
        was = _start(state) if pending is None else drop_replica_dim(pending)
        objective = scaled(partial(self.objective, unit=self.unit), state.opt_state)

        def add(pending: Pending, part: Any) -> Pending:
            chosen = self.chosen(state.params)
            key = self._key(state, pending)
            given = (objective, chosen, state.params, pending, key, part)
            return contribute(*given, find_unused=self.options.find_unused_parameters)

        now = in_micro_batches(add, was._replace(sums=None), rows, micro_batches)
        return now.sums, now._replace(sums=plus(in_unit(was, now.unit), now.sums))

    def _key(self, state: TrainState, pending: Pending) -> Any:
        return folded(state.rng, state.step, pending.micro_batches, self.group.communicator.replica_index())


def with_trained(params: Any, trained: Any) -> Any:
    """Puts trained leaves back in their places: the inverse of `Replica.trained`."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten([old if new is None else new for old, new in zip(leaves, treedef.flatten_up_to(trained))])


def _broken(grads: Sequence[Array]) -> Array:
    """Marks the gradients that are not all finite."""
    return jnp.stack([~jnp.all(jnp.isfinite(x)) for x in grads])


def _names(tree: Any) -> list[str]:
    """The path of each leaf."""
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _start(state: TrainState) -> Pending:
    """Nothing is pending yet."""
    return Pending(None, state.model_state, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))


def _tree(treedef: Any, chosen: Sequence[int], grads: Sequence[Array]) -> Any:
    """Gradients in a tree like the parameters, with None for leaves that have none."""
    inside = dict(zip(chosen, grads))
    return treedef.unflatten([inside.get(i) for i in range(treedef.num_leaves)])
