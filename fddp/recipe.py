"""What one replica does in a step: pure functions of (state, what is pending, rows), for schedules to launch.

It gathers contributions, lays them on wires, and when their sums come back it divides and uses them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.accumulate import accumulate
from fddp.flat import Wires, add_tail, pack, take_tail, unpack
from fddp.member import Member
from fddp.objective import Objective, Pending, Sums, contribute, mean, plus, reached
from fddp.options import Options
from fddp.plan import BucketPlan
from fddp.program import differentiable
from fddp.state import Mean, TrainState


@dataclass(frozen=True)
class Recipe:
    """A step, from one replica's point of view."""

    objective: Objective
    """The loss."""
    member: Member
    """What carries the replicas' programs."""
    options: Options
    """How to bucket, accumulate and send."""
    use: Callable[[TrainState, Mean], Any]
    """(state, mean) → the result of a step."""

    def local(self, plan: BucketPlan, state: TrainState, pending: Pending | None, rows: Any) -> tuple[Wires, Any]:
        """What this replica sends, and what it keeps for itself."""
        _, pending = self._gather(state, pending, rows)
        tail = pending.sums._replace(grads=())
        sent, kept = self._buffers(pending.model_state)
        grads = _tree(plan, self.chosen(state.params), pending.sums.grads)
        return add_tail(plan, pack(plan, grads), (tail, sent)), lifted(kept)

    def finish(self, plan: BucketPlan, state: TrainState, wires: Wires, kept: Any) -> Any:
        """The result of a step, from the sums over all replicas."""
        buckets, (tail, buffers) = take_tail(plan, wires)
        chosen, params = self.chosen(state.params), jax.tree.leaves(state.params)
        came = plan.treedef.flatten_up_to(unpack(plan, buckets))
        # What did not travel has a gradient of zero.
        grads = [jnp.zeros_like(params[i]) if came[i] is None else came[i] for i in chosen]
        means = mean(tail._replace(grads=grads))
        model_state = buffers if self.options.broadcast_buffers else lowered(kept)
        used = None if tail.used is None else _tree(plan, chosen, list(tail.used.astype(jnp.int32)))
        return self.use(state, Mean(_tree(plan, chosen, means.grads), means.loss, means.aux, model_state, used))

    def hold(self, state: TrainState, pending: Pending | None, rows: Any) -> tuple[Pending, Sums]:
        """What is pending when these rows are added, and their own mean loss and aux."""
        sums, pending = self._gather(state, pending, rows)
        return lifted(pending), mean(sums._replace(grads=()))

    def one(self, state: TrainState, part: Any) -> tuple[Sums, tuple[bool, ...]]:
        """The contribution of one micro-batch, and which of the trained leaves have a path to the loss."""
        chosen = self.chosen(state.params)
        given = (self.objective, chosen, state.params, _start(state), state.rng, part)
        paths = reached(*given) if self.options.find_unused_parameters else (True,) * len(chosen)
        return contribute(*given).sums, paths

    def chosen(self, params: Any) -> tuple[int, ...]:
        """Which leaves are trained: those that can have a gradient and are not to be ignored."""
        named = jax.tree_util.tree_leaves_with_path(params)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
        ignore = self.options.ignore or (lambda name: False)
        return tuple(i for i in differentiable([x for _, x in named]) if not ignore(names[i]))

    def trained(self, params: Any) -> Any:
        """The tree with None in place of leaves that are not trained."""
        leaves, treedef = jax.tree.flatten(params)
        chosen = set(self.chosen(params))
        return treedef.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])

    def _gather(self, state: TrainState, pending: Pending | None, rows: Any) -> tuple[Sums, Pending]:
        """Contributions of this replica's rows, and everything that is now pending."""
        was = _start(state) if pending is None else lowered(pending)

        def add(pending: Pending, part: Any) -> Pending:
            key = state.rng
            if key is not None:
                for number in (state.step, pending.micro_batches, self.member.link.number()):
                    key = jax.random.fold_in(key, number)
            given = (self.objective, self.chosen(state.params), state.params, pending, key, part)
            return contribute(*given, find_unused=self.options.find_unused_parameters)

        now = accumulate(add, was._replace(sums=None), rows, self.options.accumulation_steps)
        return now.sums, now._replace(sums=plus(was.sums, now.sums))

    def _buffers(self, model_state: Any) -> tuple[Any, Any]:
        """What of the buffers is sent, and what each replica keeps."""
        if not self.options.broadcast_buffers:
            return None, model_state
        # Replica 0's buffers plus everybody else's zeros: the sum is the broadcast, in time for the next forward.
        mine = self.member.link.number() == 0
        return jax.tree.map(lambda x: jnp.where(mine, x, jnp.zeros_like(x)), model_state), None


# What a replica has for itself crosses a program's border with a first dim, along which the replicas' lie.


def lifted(tree: Any) -> Any:
    """What one replica has for itself, as it crosses a program's border."""
    return jax.tree.map(lambda x: x[None], tree)


def lowered(tree: Any) -> Any:
    """The inverse of `lifted`."""
    return jax.tree.map(lambda x: x[0], tree)


def _start(state: TrainState) -> Pending:
    """Nothing is pending yet."""
    return Pending(None, state.model_state, jnp.zeros((), jnp.int32))


def _tree(plan: BucketPlan, chosen: Sequence[int], grads: Sequence[Array]) -> Any:
    """Gradients in a tree like the parameters, with None for leaves that have none."""
    inside = dict(zip(chosen, grads))
    return jax.tree.unflatten(plan.treedef, [inside.get(i) for i in range(len(plan.leaves))])
