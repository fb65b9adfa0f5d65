"""Gradients averaged over replicas: what `train_step` and `value_and_grad` have in common.

The first batch settles everything: it is compared on all ranks, its program gives the order of readiness, the order
the plan, the plan the pieces of a schedule. From then on a call is one run.

Source: `Reducer` in PyTorch's `reducer.cpp`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from fddp.accumulate import accumulate
from fddp.flat import Wires
from fddp.group import Group
from fddp.member import EVERYWHERE, trace
from fddp.objective import Objective, Pending, Sums, contribute, mean, plus, reached
from fddp.options import Options
from fddp.plan import BucketPlan, make_plan
from fddp.program import collectives, differentiable, ready_order, refuse_tracers
from fddp.replicas import described, verify
from fddp.schedule import Pieces, Runner, Schedule, after, fused, staged
from fddp.shards import other_axes, pack_parts, parts, specs, unpack_parts
from fddp.state import Mean, TrainState

SCHEDULES: dict[str, Schedule] = {"fused": fused, "after": after, "staged": staged}


class Reducer:
    """Averages the gradients of one objective over the replicas of a group."""

    def __init__(
        self, objective: Objective, group: Group, options: Options, use: Callable[[TrainState, Mean], Any]
    ) -> None:
        """Args:
        objective: the loss.
        group: the replicas.
        options: how to bucket, accumulate and send.
        use: (state, mean) → the result of a call; runs on every replica.
        """
        self.group, self.options, self.use = group, options, use
        self.plan: BucketPlan | None = None
        self.where: Any = None
        """A tree like the state: where the parts of each array lie, if a replica is several devices."""
        self._objective = objective
        self._runner: Runner | None = None
        own = group.member.own
        self._hold = group.member.program(
            self._held, (EVERYWHERE, own, own), (own, EVERYWHERE), donate=(1,) if options.donate else ()
        )

    def reduce(self, state: TrainState, batch: Any) -> Any:
        """Gradients of all replicas' rows, averaged, then `use`."""
        rows = self._rows(state, batch, "step")
        return self.runner.run(state._replace(accumulated=None), state.accumulated, rows)

    def hold(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums]:
        """Adds a batch to what is pending, without traffic; also tells this process's own mean loss and aux."""
        rows = self._rows(state, batch, "no_sync")
        accumulated, means = self._hold(
            state._replace(accumulated=None), state.accumulated, self.group.member.feed(rows)
        )
        return state._replace(accumulated=accumulated), means

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """The whole step as XLA gets it."""
        rows = self._rows(state, batch, "step")
        if self.runner.lower is None:
            raise ValueError("this step runs several programs; a step that can be lowered has schedule='fused'.")
        return self.runner.lower(state._replace(accumulated=None), state.accumulated, rows)

    @property
    def runner(self) -> Runner:
        """What the schedule made of the step."""
        if self._runner is None:
            raise ValueError("there is no program yet: the first batch settles it.")
        return self._runner

    def expect(self, params: Any) -> None:
        """Prepares for parameters of this form; what was settled for another form is forgotten."""
        guess = self.provisional_plan(params)
        if self.plan is None or (self.plan.leaves, self.plan.treedef) != (guess.leaves, guess.treedef):
            self.plan, self._runner = guess, None

    def provisional_plan(self, params: Any) -> BucketPlan:
        """DDP's guess, the reverse of the leaves, until a batch shows the order of readiness."""
        return make_plan(parts(self.group.member, params), order=self.chosen(params)[::-1], **self.options.caps)

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

    def _rows(self, state: TrainState, batch: Any, call: str) -> Any:
        """A batch that fits; the first one settles the plan."""
        refuse_tracers((state.params, batch))
        if self._runner is None:
            self._settle(state, batch, call)
        else:
            self._check(state, batch)
        return batch

    def _settle(self, state: TrainState, batch: Any, call: str) -> None:
        found: list[tuple[tuple[int, ...], tuple[bool, ...], str]] = []

        def describe() -> Iterable[str]:
            self._check(state, batch)
            program, told, paths = self._trace(state, batch)
            found.append((self._order(state, program), paths, self._schedule(program)))
            return [
                f"call {call}",
                repr(self.options),
                f"schedule {found[0][2]}",
                f"plan {self.provisional_plan(state.params).digest}",
                *described("batch", batch),
                *described("parameter", state.params),
                *described("model_state", state.model_state),
                *described("rng", state.rng),
                *described("loss and aux", told),
            ]

        verify(self.group, "batch or loss", describe)
        ((order, paths, schedule),) = found
        # A program may differ between ranks (a branch in Python): rank 0's order holds for all, as in DDP. What has no
        # path to the loss on any rank does not travel.
        order = self.group.broadcast(np.asarray(order, np.int32))
        paths = self.group.all_reduce(np.asarray(paths, np.int32), op="max")
        dead = {i for i, path in zip(self.chosen(state.params), paths) if not path}
        order = [i for i in order if i not in dead]
        self.where = specs(self.group.member, state._replace(accumulated=None))
        self.plan = plan = make_plan(parts(self.group.member, state.params), order=order, **self.options.caps)
        pieces = Pieces(partial(self._local, plan), partial(self._finish, plan))
        self._runner = SCHEDULES[schedule](self.group.member, pieces, self.options.donate)

    def _check(self, state: TrainState, batch: Any) -> None:
        leaves = jax.tree.leaves(batch)
        if not leaves:
            raise ValueError(f"the batch is empty: got {batch!r}; give this process's rows as a tree of arrays.")
        counts = {np.shape(x)[:1] for x in leaves}
        if len(counts) > 1 or () in counts:
            raise ValueError(
                f"the arrays of a batch must have equally many rows, got {', '.join(described('', batch))}."
            )
        ((rows,),) = counts
        if rows % self._parts or rows == 0:
            raise ValueError(
                f"a batch of {rows} rows cannot be divided into {self._parts} equal parts: this process has "
                f"{self._replicas} replicas × {self.options.accumulation_steps} micro-batches."
            )
        for pending in jax.tree.leaves(state.accumulated)[:1]:
            if len(pending) != self.group.member.share:
                raise ValueError(
                    f"the state has gradients pending of {len(pending)} replicas, this group has "
                    f"{self.group.member.share}; synchronize with a step before the number of replicas changes."
                )

    @property
    def _replicas(self) -> int:
        """Replicas of this process."""
        return self.group.size // self.group.processes

    @property
    def _parts(self) -> int:
        """Micro-batches in this process's batch."""
        return self._replicas * self.options.accumulation_steps

    def _trace(self, state: TrainState, batch: Any) -> tuple[ClosedJaxpr, Any, tuple[bool, ...]]:
        """The gradients of one micro-batch of one replica as a program, the form of loss and aux, and which of the
        trained leaves have a path to the loss."""
        chosen, paths = self.chosen(state.params), []

        def program(state: TrainState, batch: Any) -> tuple[Any, Any]:
            part = jax.tree.map(lambda x: x[: x.shape[0] // self._parts], batch)
            one = (self._objective, chosen, state.params, _start(state), state.rng, part)
            paths.append(reached(*one) if self.options.find_unused_parameters else (True,) * len(chosen))
            sums = contribute(*one).sums
            return sums.grads, (sums.loss, sums.aux)

        try:
            closed, (_, told) = trace(self.group.member, program, state, batch)
            return closed, told, paths[0]
        except NameError as error:
            unbound = re.search(r"unbound axis name: ([^.\s]+)", str(error))
            if unbound is None:
                raise
            axis = self.group.axis_name
            there = f"the axis {axis!r}" if axis else "no mesh axis; use backend 'gloo' or 'nccl'"
            raise ValueError(
                f"the loss has a collective over the axis {unbound[1]!r}; backend {self.group.backend!r} has {there}."
            ) from None

    def _order(self, state: TrainState, program: ClosedJaxpr) -> tuple[int, ...]:
        chosen = self.chosen(state.params)
        if self.options.order == "reverse":
            return chosen[::-1]
        return tuple(chosen[k] for k in ready_order(program, len(chosen)))

    def _schedule(self, program: ClosedJaxpr) -> str:
        """Which schedule to run: the one asked for, or the one that overlaps here."""
        own = collectives(program)
        if self.options.schedule == "staged" and own:
            raise ValueError(
                f"the loss has collectives of its own ({', '.join(sorted(own))}), whose order among the buckets that "
                "another thread sends would differ between ranks; use schedule='fused'."
            )
        if self.options.schedule == "staged" and other_axes(self.group.member):
            raise ValueError(
                f"a replica is several devices here (along {', '.join(map(repr, other_axes(self.group.member)))}), and "
                "schedule='staged' cuts the program of one; use schedule='fused'."
            )
        if self.options.schedule != "auto":
            return self.options.schedule
        cpu_hosts = self.group.processes > 1 and self._replicas == 1 and jax.default_backend() == "cpu"
        return "staged" if cpu_hosts and not own and not other_axes(self.group.member) else "fused"

    def _gather(self, state: TrainState, pending: Pending | None, rows: Any) -> tuple[Sums, Pending]:
        """Contributions of this replica's rows, and everything that is now pending."""
        was = _start(state) if pending is None else _lowered(pending)

        def add(pending: Pending, part: Any) -> Pending:
            key = state.rng
            if key is not None:
                for number in (state.step, pending.micro_batches, self.group.member.number()):
                    key = jax.random.fold_in(key, number)
            find = self.options.find_unused_parameters
            one = (self._objective, self.chosen(state.params), state.params, pending, key, part)
            return contribute(*one, find_unused=find)

        now = accumulate(add, was._replace(sums=None), rows, self.options.accumulation_steps)
        return now.sums, now._replace(sums=plus(was.sums, now.sums))

    def _held(self, state: TrainState, pending: Pending | None, rows: Any) -> tuple[Pending, Sums]:
        sums, pending = self._gather(state, pending, rows)
        return _lifted(pending), mean(sums._replace(grads=()))

    def _local(self, plan: BucketPlan, state: TrainState, pending: Pending | None, rows: Any) -> tuple[Wires, Any]:
        _, pending = self._gather(state, pending, rows)
        tail = pending.sums._replace(grads=())
        sent, kept = self._buffers(pending.model_state)
        grads = _tree(plan, self.chosen(state.params), pending.sums.grads)
        return pack_parts(self.group.member, plan, grads, (tail, sent), self.where.params), _lifted(kept)

    def _buffers(self, model_state: Any) -> tuple[Any, Any]:
        """What of the buffers is sent, and what each replica keeps."""
        if not self.options.broadcast_buffers:
            return None, model_state
        # Replica 0's buffers plus everybody else's zeros: the sum is the broadcast, in time for the next forward.
        mine = self.group.member.number() == 0
        return jax.tree.map(lambda x: jnp.where(mine, x, jnp.zeros_like(x)), model_state), None

    def _finish(self, plan: BucketPlan, state: TrainState, wires: Wires, kept: Any) -> Any:
        came, (tail, buffers) = unpack_parts(self.group.member, plan, wires, self.where.params)
        chosen, params = self.chosen(state.params), jax.tree.leaves(state.params)
        # What did not travel has a gradient of zero.
        grads = [jnp.zeros_like(params[i]) if came[i] is None else came[i] for i in chosen]
        means = mean(tail._replace(grads=grads))
        model_state = buffers if self.options.broadcast_buffers else _lowered(kept)
        used = None if tail.used is None else _tree(plan, chosen, list(tail.used.astype(jnp.int32)))
        return self.use(state, Mean(_tree(plan, chosen, means.grads), means.loss, means.aux, model_state, used))


def _start(state: TrainState) -> Pending:
    """Nothing is pending yet."""
    return Pending(None, state.model_state, jnp.zeros((), jnp.int32))


# What a replica has for itself crosses a program's border with a first dim, along which the replicas' lie.


def _lifted(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _lowered(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _tree(plan: BucketPlan, chosen: Sequence[int], grads: Sequence[Array]) -> Any:
    """Gradients in a tree like the parameters, with None for leaves that have none."""
    inside = dict(zip(chosen, grads))
    return jax.tree.unflatten(plan.treedef, [inside.get(i) for i in range(len(plan.leaves))])
