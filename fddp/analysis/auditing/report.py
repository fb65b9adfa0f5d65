"""Reports the collectives in a compiled step's schedule, and the computation that overlaps them.

Source: Li et al. (VLDB 2020), Fig. 6, from the program in place of a profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.analysis.auditing.carried import carried, merged, within_replicas
from fddp.analysis.auditing.device_memory import Memory, memory_of, table_of_tasks
from fddp.analysis.auditing.estimate import estimate
from fddp.analysis.auditing.problems import problems
from fddp.analysis.auditing.targets import Target, read_target
from fddp.buckets import BucketPlan, MiB, whole_forms
from fddp.hlo import Collective, Module, find_collectives, parse, total_flops, work
from fddp.jax_internals import compile_to_read
from fddp.measuring import draw, figure
from fddp.schedules import Communicate, Footprint, TaskList, Timeline
from fddp.step import TrainState, check_state, check_step, memory_footprint
from fddp.training import TrainStep
from fddp.wording import preformatted, table

HEAD = (
    *("starts", "carries", "kind", "MiB", "dtype", "mode"),
    *("heavy operations in flight", "of all FLOPs"),
)


@dataclass(frozen=True)
class Audit:
    """A step's compiled program compared with its plan; `print(audit)` shows a table."""

    where: str
    """The target, or the platform of the step's devices."""
    plan: BucketPlan
    """The planned buckets."""
    collectives: tuple[Collective, ...]
    """The program's collectives, in start order."""
    messages: tuple[str, ...]
    """Names of the messages in the step's list of tasks, in order: "bucket 0", "tail"."""
    carries: tuple[str | None, ...]
    """The message of each collective; None for a collective of the loss and for merged ones."""
    within: tuple[bool, ...]
    """True for each collective inside a replica: no traffic between replicas, no problem."""
    heavy: int
    """Number of matrix products and convolutions in the program."""
    flops: int
    """Their floating-point operations in one replica's step."""
    looped: int
    """The part of these operations in loops."""
    timeline: Timeline | None
    """The estimate for a target, else None; names of communications are indices of collectives."""
    memory: Memory | None = None
    """Bytes of a step on a device; None if the platform does not report them."""
    tasks: Footprint | None = None
    """Bytes at each task of a step of several programs, which has no collectives; else None."""

    def problems(self) -> tuple[str, ...]:
        """Describes each cause of exposed traffic, with advice.

        Empty for a step of several programs; `step.measure` shows their exposed traffic.
        """
        if self.tasks:
            return ()
        return tuple(problems(self))

    def picture(self, path: str | Path) -> None:
        """Draws the estimated schedule.

        Args:
          path: the output file; its suffix sets the format.

        Raises:
          ValueError: the audit has no target, so it has no estimate.
          RuntimeError: matplotlib is not installed.
        """
        if self.timeline is None:
            raise ValueError(
                "only an audit with a target has a schedule to draw; "
                "give fddp.audit(…, target='h100:8')."
            )
        line = self.timeline
        sheet, (axis,) = figure(1)
        draw(axis, {self.where: line}, [self.label(k) for k in range(len(self.collectives))])
        axis.set_title(
            f"{1e3 * line.seconds:.2f} ms, {1e3 * line.exposed:.2f} ms of traffic exposed",
            loc="left",
        )
        axis.set_xlabel("ms, estimated at peak rates")
        sheet.savefig(path, dpi=150)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Indices of the collectives with a message."""
        return tuple(k for k, message in enumerate(self.carries) if message is not None)

    def label(self, k: int) -> str:
        """Returns a label for the payload of a collective.

        Args:
          k: index of the collective.

        Returns:
          "bucket 2", "tail", "within a replica", "merged" or "other".
        """
        if self.within[k]:
            return "within a replica"
        if self.carries[k] is None and merged(self.collectives[k]):
            return "merged"
        return self.carries[k] or "other"

    def __str__(self) -> str:
        if self.tasks:
            return table_of_tasks(self.where, self.tasks)
        return self._table()

    _repr_html_ = preformatted

    def _table(self) -> str:
        rows = [HEAD]
        rounds = 0
        asynchronous = 0
        for k, op in enumerate(self.collectives):
            share = "–"
            if self.flops:
                share = f"{op.flops / self.flops:.1%}"
            dtype = "+".join(sorted({array.dtype for array in op.arrays}))
            numbers = f"{op.nbytes / MiB:.3f}", dtype, _mode(op), str(op.heavy), share
            rows.append((str(k), self.label(k), op.kind, *numbers))
            rounds += op.rounds
            asynchronous += op.rounds * op.asynchronous
        lines = [
            *table(rows),
            f"{self.where}: {asynchronous} of {rounds} collectives asynchronous, "
            f"{len(self.plan.buckets)} buckets planned; {self.heavy} heavy operations, "
            f"{self.flops / 1e9:.1f} GFLOP a replica",
        ]
        if self.timeline is not None and self.sent:
            line = self.timeline
            lines.append(
                f"estimated at peak rates: {1e3 * line.seconds:.2f} ms a step, "
                f"{1e3 * line.exposed:.2f} ms of traffic exposed, {line.overlap_share:.0%} of all "
                "under computation"
            )
        if self.memory:
            lines.append(f"memory of a device: {self.memory}")
        lines += [f"problem: {problem}" for problem in self.problems()] or ["no problem found"]
        return "\n".join(lines)


def audit(step: TrainStep, state: TrainState, batch: PyTree, target: str | None = None) -> Audit:
    """Inspects XLA's program of a step: each all-reduce, and the computation that overlaps it.

    Nothing runs. With a target it compiles ahead of time for GPUs that need not be attached.

    Args:
      step: from `train_step`. For several programs ("staged", "eager") only memory is reported.
      state: the step's state, or its shapes (`jax.ShapeDtypeStruct`).
      batch: as for a step; with a target, the rows of all its replicas. Shapes suffice.
      target: "h100:8" for eight H100s in one host, "a100:2x8" for two hosts of eight A100s,
        "h200:4"; None for the step's own devices.

    Returns:
      An `Audit`. See also its `problems()` and `picture("schedule.png")`.

    Raises:
      ValueError: an unknown target, programs of unknown memory ("after"), or a program over MPI
        without a target: XLA cannot inspect MPI.
      RuntimeError: the compiler for the target is not installed.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> state = step.init(jnp.ones((4, 2)))
      >>> fddp.audit(step, state, jnp.ones((8, 4))).plan.buckets[0].names
      ('',)
    """
    check_step("fddp.audit", step)
    if target is None:
        machine = None
        where = jax.default_backend()
    else:
        machine = read_target(target)
        where = machine.name
        step, state, batch = moved(step, state, batch, machine)
    task_list = step.tasks(state, batch)
    memory = memory_footprint(step.settled, state, batch)
    if not step.settled.is_one_program:
        return _of_stages(step, memory, where, task_list)
    if machine is None and step.group.backend == "mpi" and step.group.size > 1:
        raise ValueError(
            "an audit reads XLA's collectives, and cannot read MPI's calls; give "
            "a target, fddp.audit(…, target='h100:8'), or use backend 'gloo'."
        )
    compiled = compile_to_read(step.lower(state, batch))
    module = parse(compiled.as_text() or "")
    collectives = find_collectives(module)
    within = within_replicas(collectives, step.group.placement)
    report = read(module, collectives, within, task_list.messages, step.plan, where, machine)
    return replace(report, memory=memory_of(memory))


def _of_stages(step: TrainStep, tasks: Footprint | None, where: str, task_list: TaskList) -> Audit:
    """Returns the audit of a step of several programs: its memory."""
    if tasks is None:
        raise ValueError(
            "this step has several programs, and sends messages between them: for the schedules "
            "'staged' and 'eager' an audit reports only the memory; for schedule='fused' it reads "
            "the collectives as well."
        )
    messages = tuple(task.name for task in task_list.messages)
    memory = memory_of(tasks)
    return Audit(where, step.plan, (), messages, (), (), 0, 0, 0, None, memory, tasks=tasks)


def _mode(op: Collective) -> str:
    """Describes if a collective is asynchronous, and the loop or branch around it."""
    mode = "synchronous"
    if op.asynchronous:
        mode = "asynchronous"
    if op.loops:
        mode += f", in {op.rounds} rounds of a loop"
    elif op.branches:
        mode += ", in a branch"
    if op.pipelined:
        mode += ", each under the next"
    if op.ahead:
        mode += ", each under the one before"
    if op.registered:
        mode += ", registered"
    return mode


def moved(
    step: TrainStep, state: TrainState, batch: PyTree, target: Target
) -> tuple[TrainStep, TrainState, Any]:
    """Moves a step to a target, with the shapes of its state and of all replicas' rows."""
    check_state(state)
    step = step.on(target.group())
    state, batch = jax.tree.map(_shape, (state, batch))
    state = step.shapes(
        whole_forms(state.params), model_state=whole_forms(state.model_state), rng=state.rng
    )
    return step, state, batch


def read(
    module: Module,
    collectives: tuple[Collective, ...],
    within: tuple[bool, ...],
    sends: Sequence[Communicate],
    plan: BucketPlan,
    where: str,
    target: Target | None,
) -> Audit:
    """Returns the audit of a compiled program; `sends` are its planned messages."""
    lines = next(module.schedules()).lines
    messages = tuple(task.name for task in sends)
    # A loss may gather buckets as well.
    gathers = [f"gather {k}" for k in range(len(plan.buckets))]
    heavy = flops = looped = 0
    for line, computation in lines:
        works = work(module, line, computation)
        heavy += len(works)
        flops += total_flops(works)
        if line.opcode == "while":
            looped += total_flops(works)
    return Audit(
        where=where,
        plan=plan,
        collectives=collectives,
        messages=messages,
        carries=carried(collectives, [*messages, *gathers]),
        within=within,
        heavy=heavy,
        flops=flops,
        looped=looped,
        timeline=target and estimate(module, collectives, target),
    )


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    dtype = getattr(x, "dtype", None) or jnp.result_type(x)
    # NumPy's float64 is JAX's float32 unless 64 bits are enabled. JAX 0.11 warns of the cast.
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype)
