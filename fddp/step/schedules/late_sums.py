"""Returns from a step before its last sums arrive: the next step's program receives them.

So they travel under the next forward pass, and each update runs before the layer that reads it.

Source: ByteScheduler (Peng et al., SOSP 2019), whose messages cross the border between steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
from jaxtyping import Array, Int

from fddp.buckets import insert_shards
from fddp.comm import (
    REPLICATED,
    Group,
    add_replica_dim,
    drop_replica_dim,
    forms_of,
    of_one_replica,
    trace,
)
from fddp.program import SplitProgram, split_late
from fddp.step.schedules.compile_reports import report_first_call
from fddp.step.schedules.one_program import fed, overlap, traced
from fddp.step.schedules.pieces import Pieces, Runner, StepInputs, StepOutputs
from fddp.step.schedules.timeline import timeline_of


@dataclass(frozen=True, eq=False)
class Late:
    """A step for inputs of one form, split behind what its report needs."""

    group: Group
    split: SplitProgram
    forms: StepInputs
    """Shapes and dtypes of the inputs of all replicas."""
    treedef: Any
    """The tree of (state, shards, memory)."""
    info: Any
    """The tree of the report."""
    owner: Any
    """The step whose next call can receive the sums."""

    @property
    def specs(self) -> tuple[Any, Any, Any]:
        """The specs of sums in flight: the step, passed and computed arrays."""
        count = len(jax.tree.leaves(self.forms.state))
        per_replica = self.group.placement.per_replica
        passed = [REPLICATED if k < count else per_replica for k in self.split.passed]
        return REPLICATED, passed, per_replica

    def first(self, inputs: Sequence[Any]) -> tuple[Any, tuple[Any, list[Any], list[Any]]]:
        """Returns the report, and (step, passed arrays, computed arrays), for one replica."""
        leaves = jax.tree.leaves(inputs)
        (step, *info), computed = self.split.first(*leaves, late=True)
        passed = [leaves[k] for k in self.split.passed]
        return self.info.unflatten(info), (step, passed, add_replica_dim(computed))

    def second(self, step: Array, passed: Sequence[Any], computed: Sequence[Any]) -> Any:
        """Returns (state, shards, memory) of one replica."""
        received = self.split.received(drop_replica_dim(computed))
        outputs = self.split.rest(passed, received)
        return self.treedef.unflatten([step, *outputs])


@jax.tree_util.register_pytree_node_class
class StateInFlight:
    """A state whose last sums are in flight, from a step with `schedule="eager"`.

    Pass it to the next step. `step.finish(state)` returns the `TrainState`; `fddp.evaluate`,
    `fddp.whole`, `Checkpoints.save` and the other calls that take a state do so themselves.
    """

    accumulated = None

    def __init__(self, arrays: tuple[Int[Array, ""], list[Any], list[Any]], late: Late) -> None:
        self.arrays = arrays
        """(step, passed arrays, computed arrays)."""
        self.late = late
        self._finished: Any = None

    @property
    def step(self) -> Int[Array, ""]:
        """Number of synchronized steps so far."""
        return self.arrays[0]

    def finish(self) -> Any:
        """Waits for the sums, and returns the state."""
        if self._finished is None:
            state, shards, _ = _finishing(self.late)(*self.arrays)
            self._finished = insert_shards(state, shards)
        return self._finished

    @property
    def finished(self) -> bool:
        """True if the sums have been received."""
        return self._finished is not None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"state.{name}: sums of this state are in flight, as schedule='eager' leaves them. "
            "step.finish(state) returns the state."
        )

    def __repr__(self) -> str:
        return "StateInFlight(step.finish(state) returns the state)"

    def tree_flatten(self) -> tuple[Any, Late]:
        """Splits it for JAX."""
        return self.arrays, self.late

    @classmethod
    def tree_unflatten(cls, late: Late, arrays: Any) -> "StateInFlight":
        return cls(arrays, late)


def finished(state: Any) -> Any:
    """Returns a state with all of its sums."""
    return state.finish() if isinstance(state, StateInFlight) else state


def eager(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Makes a step that returns before its last sums arrive.

    Where XLA carries the messages, they end with their program. There, and with a hook that has a
    memory, the step is as `overlap`.
    """
    plain = overlap(group, pieces, donate)
    if not group.communicator.in_lane:
        return plain
    step = partial(traced, group, pieces)

    @cache
    def late_of(treedef: Any, forms: tuple[Any, ...]) -> Late | None:
        return _split(group, step, StepInputs(*treedef.unflatten(forms)))

    @cache
    def starting(late: Late) -> Callable[..., Any]:
        specs = (REPLICATED, *[group.placement.per_replica] * 4), (REPLICATED, late.specs)
        return _program(group, lambda *inputs: late.first(inputs), *specs)

    @cache
    def going_on(last: Late, treedef: Any, row_forms: tuple[Any, ...]) -> tuple[Any, Late]:
        """Makes the next step's program, for rows of these forms."""
        rows = treedef.unflatten(row_forms)
        late: Any = late_of(*_key(last.forms._replace(rows=rows, pending=None)))

        def run(in_flight: Any, rows: Any) -> Any:
            state, shards, memory = last.second(*in_flight)
            return late.first(StepInputs(state, None, shards, memory, rows))

        specs = (last.specs, group.placement.per_replica), (REPLICATED, late.specs)
        return _program(group, run, *specs, (0,) if donate else ()), late

    last_program: Any = plain  # whose calls have a timeline

    def launched(inputs: StepInputs, call: Callable[..., Any]) -> StepOutputs | None:
        """Runs a step; None if it has no late sums."""
        nonlocal last_program
        state = inputs.state
        if isinstance(state, StateInFlight):
            # The state's forms are those of the last step: only the rows are looked at.
            last_program, late = going_on(state.late, *_key(forms_of(inputs.rows)))
            info, in_flight = call(last_program)(state.arrays, inputs.rows)
        else:
            first = late_of(*_key(forms_of(inputs)))
            if first is None:
                return None
            late = first
            last_program = starting(late)
            info, (step, _, computed) = call(last_program)(*inputs)
            leaves = jax.tree.leaves(inputs)
            in_flight = step, [leaves[k] for k in late.split.passed], computed
        return StepOutputs((StateInFlight(in_flight, late), info), [], ())

    def run(inputs: StepInputs) -> StepOutputs:
        outputs = launched(fed(group, inputs), lambda program: program)
        return plain.run(inputs) if outputs is None else outputs

    def inside(inputs: StepInputs) -> StepOutputs:
        outputs = launched(inputs, lambda program: program.__wrapped__)
        return plain.inside(inputs) if outputs is None else outputs  # type: ignore

    return plain._replace(
        run=run,
        inside=inside,
        goes_on=lambda state: state.late.owner is step and not state.finished,
        timeline=lambda: last_program.timeline(),
    )


def _split(group: Group, step: Callable[..., Any], inputs: StepInputs) -> Late | None:
    """Splits a step behind its report; None if no sum is late."""
    placement = group.placement
    state, pending, shards, memory, rows = inputs
    local = of_one_replica((pending, shards, memory, rows), placement.replicas_in_array)
    closed, shapes = trace(placement, step, state, *local)
    (new_state, info), *others = shapes
    # Returned gradients have no next step, and a hook's memory may be that of an unsent leaf.
    if not hasattr(new_state, "step") or jax.tree.leaves(memory):
        return None
    first = len(jax.tree.leaves(new_state))
    report = range(first, first + len(jax.tree.leaves(info)))
    passes = len(jax.tree.leaves(inputs)) - len(jax.tree.leaves(rows))
    split = split_late(closed, (0, *report), passes)
    if not split.begun:
        return None
    treedef = jax.tree.structure((new_state, *others))
    return Late(group, split, inputs, treedef, jax.tree.structure(info), step)


@cache
def _finishing(late: Late) -> Callable[..., Any]:
    per_replica = late.group.placement.per_replica
    out_specs = REPLICATED, per_replica, per_replica
    return _program(late.group, late.second, late.specs, out_specs)


def _program(
    group: Group,
    f: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    donate: Sequence[int] = (),
) -> Any:
    program: Any = group.placement.program(f, in_specs, out_specs, donate=donate)
    launch: Any = report_first_call(program, "the step", group)
    launch.__wrapped__ = program.__wrapped__
    launch.timeline = lambda: timeline_of(*program.times())
    return launch


def _key(forms: Any) -> tuple[Any, tuple[Any, ...]]:
    leaves, treedef = jax.tree.flatten(forms)
    return treedef, tuple(leaves)
