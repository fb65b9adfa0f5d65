"""Gradients averaged over replicas: what `train_step` and `value_and_grad` have in common.

The first batch settles everything: it is compared on all ranks, its program gives the order of readiness, the order
the plan, the plan the pieces of a schedule. From then on a call is one run.

Source: `Reducer` in PyTorch's `reducer.cpp`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from fddp.buckets import BucketPlan, scalar_dtype
from fddp.comm import REPLICATED, Group, described, shortened, specs, trace, verify
from fddp.jax_internals import ClosedJaxpr, without_jit
from fddp.jaxpr import collectives, ready_order, refuse_deleted
from fddp.losses import Objective, Sums
from fddp.schedules import Pieces, Runner, Schedule, after, fused, staged
from fddp.step.checks import check_params, refuse_lists, refuse_tracers, verify_collectives
from fddp.step.options import Options
from fddp.step.replica import Recipe
from fddp.step.state import Mean, TrainState

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
        if options.hook is not None and group.placement.other_axes:
            raise ValueError(
                f"{options.hook} works on whole buckets, and a replica of this group is several devices, along "
                f"{', '.join(group.placement.other_axes)}; a hook needs replicas of one device each."
            )
        self.group, self.options = group, options
        self.recipe = Recipe(objective, group, options, use)
        self.plan: BucketPlan | None = None
        self.where: Any = None
        """A tree like the state: where the parts of each array lie, if a replica is several devices."""
        self._runner: Runner | None = None
        self._hold: Any = None
        """What adds a batch to what is pending; with the runner, the first batch settles it."""
        self._compared = False  # whether the ranks' compiled programs are known to send the same
        self._left_out: tuple[int, ...] = ()
        """Trained leaves that no bucket holds, and"""
        self._forms = set[Any]()
        """the forms of batches whose loss is known to have no path to them."""

    def reduce(self, state: TrainState, batch: Any) -> tuple[Any, Any]:
        """Gradients of all replicas' rows, averaged, then `use`; and the state of the hook."""
        rows = self._rows(state, batch, "step")
        arguments = (*self._arguments(state), rows)
        if not self._compared and self.runner.lower and self.group.processes > 1:
            verify_collectives(self.group, self.runner.lower(*arguments))
        self._compared = True
        with self.group.recovery.attempt():
            result, memory = self.runner.run(*arguments)
        return result, self.recipe.by_leaf(self._settled[0], state.hook_state, memory)

    def hold(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums]:
        """Adds a batch to what is pending, without traffic; also tells this process's own mean loss and aux."""
        rows = self._rows(state, batch, "no_sync")
        equal, pending, _ = self._arguments(state)
        accumulated, means = self._hold(equal, pending, self.group.placement.feed(rows))
        if self.group.placement.shares_cores:
            jax.block_until_ready(accumulated)
        return state._replace(accumulated=accumulated), means

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """The whole step as XLA gets it."""
        rows = self._rows(state, batch, "step")
        if self.runner.lower is None:
            raise ValueError("this step runs several programs; a step that can be lowered has schedule='fused'.")
        return self.runner.lower(*self._arguments(state), rows)

    @property
    def runner(self) -> Runner:
        """What the schedule made of the step."""
        return self._settled[1]

    @property
    def _settled(self) -> tuple[BucketPlan, Runner]:
        if self.plan is None or self._runner is None:
            raise ValueError("there is no program yet: the first batch settles it.")
        return self.plan, self._runner

    def _arguments(self, state: TrainState) -> tuple[TrainState, Any, Any]:
        """What is equal on all replicas, what is pending, and what is remembered for each wire."""
        place, own = self.group.placement.place, self.group.placement.per_replica
        memory = () if self.plan is None else self.recipe.by_wire(self.plan, state.hook_state)
        # A user may have put numbers, NumPy's arrays or arrays of one device into the state.
        equal = place(state._replace(accumulated=None, hook_state=()), REPLICATED)
        return equal, *place((state.accumulated, memory), own)

    def expect(self, params: Any) -> None:
        """Prepares for parameters of this form; what was settled for another form is forgotten."""
        guess = self.provisional_plan(params)
        if self.plan is None or (self.plan.leaves, self.plan.treedef) != (guess.leaves, guess.treedef):
            self.plan, self._runner = guess, None

    def provisional_plan(self, params: Any) -> BucketPlan:
        """DDP's guess, the reverse of the leaves, until a batch shows the order of readiness."""
        return self.recipe.plan(params, self.recipe.chosen(params)[::-1])

    def _rows(self, state: TrainState, batch: Any, call: str) -> Any:
        """A batch that fits; the first one settles the plan."""
        refuse_tracers((state.params, batch))
        refuse_deleted(state)
        if self.plan is None or self._runner is None:
            self._settle(state, batch, call)
        else:
            check_params(self.plan, state.params)
            self._check(state, batch)
            self._check_paths(state, batch)
        return batch

    def _settle(self, state: TrainState, batch: Any, call: str) -> None:
        found: list[tuple[tuple[int, ...], tuple[bool, ...], str, Any]] = []

        def describe() -> Iterable[str]:
            self._check(state, batch)
            self._check_memory(state)
            program, told = self._trace(state, batch)
            found.append((self._order(state, program), self._paths(state, batch), self._schedule(program), told))
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
        ((order, paths, schedule, told),) = found
        # A program may differ between ranks (a branch in Python): rank 0's order holds for all, as in DDP. What has no
        # path to the loss on any rank does not travel.
        order = self.group.broadcast(np.asarray(order, np.int32))
        paths = self.group.all_reduce(np.asarray(paths, np.int32), op="max")
        reached = {i for i, path in zip(self.recipe.chosen(state.params), paths) if path}
        # Where each step skips what it does not use, a later batch may use what this one has no path to.
        later = [i for i in order if i not in reached] if self.options.skip_all_reduce_unused_params else []
        order = [*(i for i in order if i in reached), *later]
        self.where = where = specs(self.group.placement, state._replace(accumulated=None, hook_state=()))
        averaged = state.model_state if self.options.broadcast_buffers == "mean" else None
        dtype = scalar_dtype(jax.tree.leaves((told, averaged)))
        self.plan = plan = self.recipe.plan(state.params, order, dtype=dtype, early=schedule == "staged")
        self._left_out = tuple(i for i in self.recipe.chosen(state.params) if i not in order)
        self._forms = {_form(batch)}
        self.recipe = replace(self.recipe, unit=np.shape(jax.tree.leaves(batch)[0])[0] // self._parts)
        pieces = Pieces(
            partial(self.recipe.local, plan, where.params),
            self.recipe.reductions(plan, state.params),
            partial(self.recipe.finish, plan, where.params),
        )
        placement, own = self.group.placement, self.group.placement.per_replica
        donated = (1,) if self.options.donate else ()
        self._hold = placement.program(self.recipe.hold, (REPLICATED, own, own), (own, REPLICATED), donate=donated)
        self._runner = SCHEDULES[schedule](self.group, pieces, self.options.donate)

    def _check(self, state: TrainState, batch: Any) -> None:
        leaves = jax.tree.leaves(batch)
        if not leaves:
            raise ValueError(f"the batch is empty: got {batch!r}; give this process's rows as a tree of arrays.")
        counts = {np.shape(x)[:1] for x in leaves}
        if len(counts) > 1 or () in counts:
            refuse_lists(batch)
            got = shortened(described("", batch), ", ")
            raise ValueError(f"the arrays of a batch must have equally many rows, got {got}.")
        ((rows,),) = counts
        if rows % self._parts or rows == 0:
            raise ValueError(
                f"a batch of {rows} rows cannot be divided into {self._parts} equal parts: this process has "
                f"{self._replicas} replicas × {self.options.accumulation_steps} micro-batches."
            )
        for pending in jax.tree.leaves(state.accumulated)[:1]:
            if len(pending) != self.group.placement.replicas_in_array:
                raise ValueError(
                    f"the state has gradients pending of {len(pending)} replicas, this group has "
                    f"{self.group.size}; synchronize with a step before the number of replicas changes."
                )

    def _check_paths(self, state: TrainState, batch: Any) -> None:
        """A batch of another form may have another program, with paths that the first one had not."""
        if not self._left_out or (form := _form(batch)) in self._forms:
            return
        plan, _ = self._settled
        paths = dict(zip(self.recipe.chosen(state.params), self._paths(state, batch)))
        new = [plan.leaves[i].name for i in self._left_out if paths[i]]
        if new:
            raise ValueError(
                f"this batch has other arrays than the first one, and with them the loss uses {', '.join(new)}, which "
                "it then had no path to, so that no bucket has a place for them; with "
                "skip_all_reduce_unused_params=True every step decides anew what is sent."
            )
        self._forms.add(form)

    def _check_memory(self, state: TrainState) -> None:
        share = self.group.placement.replicas_in_array
        got, wanted = described("", state.hook_state), described("", self.recipe.memory_form(state.params))
        if got != wanted:
            raise ValueError(
                f"the state's hook_state is not that of {self.options.hook} on {share} replicas: it has "
                f"{'; '.join(got) or 'nothing'} instead of {'; '.join(wanted) or 'nothing'}. Take the one of a new "
                "step.init(params), and what was remembered is lost, or the hook and replicas it was made with."
            )

    @property
    def _replicas(self) -> int:
        """Replicas of this process."""
        return self.group.size // self.group.processes

    @property
    def _parts(self) -> int:
        """Micro-batches in this process's batch."""
        return self._replicas * self.options.accumulation_steps

    def _trace(self, state: TrainState, batch: Any) -> tuple[ClosedJaxpr, Any]:
        """The gradients of one micro-batch of one replica as a program, and the form of loss and aux."""

        def program(state: TrainState, batch: Any) -> tuple[Any, Any]:
            sums = self.recipe.one(state, self._part(batch))
            return sums.grads, (sums.loss, sums.aux)

        try:
            closed, (_, told) = trace(self.group.placement, program, state, batch)
            return closed, told
        except NameError as error:
            unbound = re.search(r"unbound axis name: ([^.\s]+)", str(error))
            if unbound is None:
                raise
            axis = self.group.axis_name
            there = f"the axis {axis!r}" if axis else "no mesh axis; use backend 'gloo' or 'nccl'"
            raise ValueError(
                f"the loss has a collective over the axis {unbound[1]!r}; backend {self.group.backend!r} has {there}."
            ) from None

    def _paths(self, state: TrainState, batch: Any) -> tuple[bool, ...]:
        """Which of the trained leaves have a path to the loss."""
        found: list[tuple[bool, ...]] = []

        def program(state: TrainState, batch: Any) -> None:
            found.append(self.recipe.paths(state, self._part(batch)))

        trace(self.group.placement, program, state, batch)
        return found[0]

    def _part(self, batch: Any) -> Any:
        """The rows of one micro-batch."""
        return jax.tree.map(lambda x: x[: x.shape[0] // self._parts], batch)

    def _order(self, state: TrainState, program: ClosedJaxpr) -> tuple[int, ...]:
        chosen = self.recipe.chosen(state.params)
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
        axes = self.group.placement.other_axes
        if self.options.schedule == "staged" and axes:
            raise ValueError(
                f"a replica is several devices here (along {', '.join(map(repr, axes))}), and "
                "schedule='staged' cuts the program of one; use schedule='fused'."
            )
        if self.options.schedule != "auto":
            return self.options.schedule
        cpu_hosts = self.group.processes > 1 and self._replicas == 1 and jax.default_backend() == "cpu"
        return "staged" if cpu_hosts and not (own or axes or without_jit()) else "fused"


def _form(batch: Any) -> Any:
    """Structure, shapes and dtypes: what a program is traced for."""
    return jax.tree.structure(batch), tuple((np.shape(x), x.dtype) for x in jax.tree.leaves(batch))
