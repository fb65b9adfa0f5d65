"""Reads what a compiled program really does: which all-reduces it has, when they leave, and what runs beside them.

A schedule is a promise of XLA's that can be read before anything runs, and for GPUs that are not here.

Source: Li et al. (VLDB 2020), Fig. 6, read off the program in place of a profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fddp.analysis.auditing.beside import Plain, beside_jit
from fddp.analysis.auditing.carried import carried, merged, within_replicas
from fddp.analysis.auditing.device_memory import Memory, memory_of, table_of_tasks
from fddp.analysis.auditing.estimate import estimate
from fddp.analysis.auditing.problems import problems
from fddp.analysis.auditing.targets import Target, read_target
from fddp.buckets import BucketPlan, MiB, whole_forms
from fddp.hlo import Collective, Module, find_collectives, parse, work
from fddp.jax_internals import compile_to_read
from fddp.measuring import draw, figure, label
from fddp.schedules import Communicate, Footprint, TaskList, Timeline
from fddp.step import TrainState, check_state, check_step, footprint
from fddp.training import TrainStep
from fddp.wording import preformatted, table


@dataclass(frozen=True)
class Audit:
    """A step's compiled program, held against the buckets of its plan; `print(audit)` is a table."""

    where: str
    """The target, or the platform of the devices that the step runs on."""
    plan: BucketPlan
    """The buckets that the program should send."""
    collectives: tuple[Collective, ...]
    """The program's collectives, in the order in which they start."""
    messages: tuple[str, ...]
    """Names of the messages in the step's list of tasks, in order: "bucket 0", "tail"."""
    carries: tuple[str | None, ...]
    """The message that each collective carries; None: none, for it is the loss's own, or several merged into one."""
    within: tuple[bool, ...]
    """Whether each collective joins devices of one replica alone: no traffic of replicas, no problem of a step."""
    heavy: int
    """Matrix products and convolutions in the program."""
    flops: int
    """Their floating-point operations in one replica's step."""
    looped: int
    """The part of these operations that is done in loops."""
    timeline: Timeline | None
    """The spans of a step on the target, as `estimate` has them; None without a target. The names of communication
    are numbers of collectives."""
    memory: Memory | None = None
    """The bytes that a device needs for a step; None where the platform does not tell."""
    tasks: Footprint | None = None
    """The bytes that there are at each task, if the step is several programs: messages leave between these, so that
    there are no collectives."""
    beside: tuple[Plain, ...] = ()
    """Plain JAX of the same loss and optimizer on the target, where that was asked."""

    def problems(self) -> tuple[str, ...]:
        """Says what keeps traffic from being hidden, and what to do about it.

        Returns:
          A sentence or two for each fault; empty if there is none, or if the step is several programs: what lies open
          there is measured, by `step.measure`.
        """
        return () if self.tasks else tuple(problems(self))

    def picture(self, path: Any) -> None:
        """Draws the estimated schedule.

        Args:
          path: file to write; its suffix says the format.

        Raises:
          ValueError: the audit has no target, so nothing is estimated.
          RuntimeError: there is no matplotlib.
        """
        if self.timeline is None:
            raise ValueError("only an audit with a target has a schedule to draw; give fddp.audit(…, target='h100:8').")
        line = self.timeline
        sheet, (axis,) = figure(1)
        draw(axis, {self.where: line})
        label(axis, line, [self.label(k) for k in range(len(self.collectives))])
        axis.set_title(f"{1e3 * line.seconds:.2f} ms, {1e3 * line.exposed:.2f} ms of traffic exposed", loc="left")
        axis.set_xlabel("ms, estimated at peak rates")
        sheet.savefig(path, dpi=150)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Numbers of the collectives that carry a message."""
        return tuple(k for k, message in enumerate(self.carries) if message is not None)

    def label(self, k: int) -> str:
        """Names what a collective carries.

        Args:
          k: its number.

        Returns:
          "bucket 2", "tail", "within a replica", "merged" or "other".
        """
        if self.within[k]:
            return "within a replica"
        return self.carries[k] or ("merged" if merged(self.collectives[k]) else "other")

    def __str__(self) -> str:
        return table_of_tasks(self.where, self.tasks) if self.tasks else self._table()

    _repr_html_ = preformatted

    def _table(self) -> str:
        head = ("starts", "carries", "kind", "MiB", "dtype", "mode", "heavy operations in flight", "of all FLOPs")
        rows: list[tuple[str, ...]] = [head]
        for k, collective in enumerate(self.collectives):
            mode = "asynchronous" if collective.asynchronous else "synchronous"
            share = f"{collective.flops / self.flops:.1%}" if self.flops else "–"
            dtypes = "+".join(sorted({array.dtype for array in collective.arrays}))
            looped = f", in {collective.rounds} rounds of a loop" if collective.loops else ""
            looped += ", each under the next" if collective.pipelined else ""
            looped += ", each under the one before" if collective.ahead else ""
            mode += looped or (", in a branch" if collective.branches else "")
            mib = f"{collective.nbytes / MiB:.3f}"
            rows.append((str(k), self.label(k), collective.kind, mib, dtypes, mode, str(collective.heavy), share))
        lines = [
            *table(rows),
            f"{self.where}: {sum(f.rounds for f in self.collectives if f.asynchronous)} of "
            f"{sum(f.rounds for f in self.collectives)} collectives asynchronous, {len(self.plan.buckets)} buckets "
            f"planned; {self.heavy} heavy operations, {self.flops / 1e9:.1f} GFLOP a replica",
        ]
        if self.timeline is not None and self.sent:
            line = self.timeline
            lines.append(
                f"estimated at peak rates: {1e3 * line.seconds:.2f} ms a step, {1e3 * line.exposed:.2f} ms of traffic "
                f"exposed, {line.overlap_share:.0%} of all under computation"
            )
        lines += [f"memory of a device: {self.memory}"] if self.memory else []
        lines += [_told(plain) for plain in self.beside]
        lines += [f"problem: {problem}" for problem in self.problems()] or ["no problem found"]
        return "\n".join(lines)


def audit(
    step: TrainStep, state: Any, batch: Any, target: str | None = None, *, beside: Literal["jit"] | None = None
) -> Audit:
    """Reads what XLA made of a step: each all-reduce, and what is computed while it is on its way.

    Nothing runs and nothing is sent. With a target the step is compiled ahead of time for GPUs that need not exist.

    Args:
      step: from `train_step`. Of a schedule of several programs ("staged", "eager") the memory is told, task by task.
      state: the step's state; only shapes matter, `jax.ShapeDtypeStruct`s will do.
      batch: as for a step. With a target: the rows of all its replicas together; only shapes matter.
      target: None: the devices that the step runs on. "h100:8": eight H100s in one host; "a100:2x8": two hosts of
        eight A100s; "h200:4".
      beside: "jit": plain JAX of the same loss and optimizer is compiled for the target too, under `jax.jit` with
        `NamedSharding` and under `jax.shard_map` with a mean for each leaf, and told below the step.

    Returns:
      An `Audit`: `print(it)`, `it.problems()`, `it.picture("schedule.png")`.

    Raises:
      ValueError: an unknown target, `beside` without one; `beside` for a schedule of several programs, or such a
        schedule whose memory XLA does not tell ("after"); or, without a target, one program of replicas that talk over
        MPI, into whose calls XLA cannot look.
      RuntimeError: the compiler for the target is not installed.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> state = step.init(jnp.ones((4, 2)))
      >>> fddp.audit(step, state, jnp.ones((8, 4))).plan.buckets[0].names
      ('',)
    """
    check_step("fddp.audit", step)
    there = None if target is None else read_target(target)
    if beside not in (None, "jit") or (beside and there is None):
        raise ValueError(f"beside must be 'jit', with a target to compile for, or None, got {beside!r}.")
    if there is not None:
        step, state, batch = moved(step, state, batch, there)
    where = there.name if there is not None else jax.default_backend()
    listed = step.tasks(state, batch)
    memory = footprint(step.settled, state, batch)
    if not step.settled.is_one_program:
        return _of_stages(step, memory, where, listed, beside)
    if there is None and step.group.backend == "mpi" and step.group.size > 1:
        raise ValueError(
            "an audit reads XLA's collectives, and MPI's are calls that it cannot look into; give a target, "
            "fddp.audit(…, target='h100:8'), or use backend 'gloo'."
        )
    compiled = compile_to_read(step.lower(state, batch))
    module = parse(compiled.as_text() or "")
    collectives = find_collectives(module)
    within = within_replicas(collectives, step.group.placement)
    found = read(module, collectives, within, listed.messages, step.plan, where, there)
    found = replace(found, memory=memory_of(memory))
    if there is None or not beside:
        return found
    return replace(found, beside=tuple(way() for way in beside_jit(step, state, batch, there).values()))


def _of_stages(step: TrainStep, found: Footprint | None, where: str, listed: TaskList, beside: str | None) -> Audit:
    """Tells of a step of several programs what can be read before it runs: its memory."""
    if beside or found is None:
        raise ValueError(
            "this step is several programs, and the messages leave between them: an audit tells the memory of the "
            "schedules 'staged' and 'eager', and no more; of schedule='fused' it reads the collectives as well."
        )
    messages = tuple(task.name for task in listed.messages)
    memory = memory_of(found)
    return Audit(where, step.plan, (), messages, (), (), 0, 0, 0, None, memory, tasks=found)


def moved(step: TrainStep, state: Any, batch: Any, target: Target) -> tuple[TrainStep, TrainState, Any]:
    """Makes of a step, its state and a batch those of a target, as forms.

    Args:
      step: a step of any group.
      state: its state.
      batch: the rows of all replicas of the target.
      target: the machine.

    Returns:
      The step, which can be lowered; the forms of state and batch.

    Raises:
      ValueError: the replicas of the step are in nodes, and those of the target cannot be in nodes of as many.
      RuntimeError: the compiler for the target is not installed.
    """
    check_state(state)
    step = step.on(target.group())
    state, batch = jax.tree.map(_shape, (state, batch))
    state = step.shapes(whole_forms(state.params), model_state=whole_forms(state.model_state), rng=state.rng)
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
    """Holds a step's tasks against the program that was compiled of them.

    Args:
      module: the program.
      collectives: its collectives.
      within: which of them are among devices of one replica.
      sends: the tasks that it should hold.
      plan: the buckets.
      where: what it is compiled for, in words.
      target: the same as data, to estimate with; or None.

    Returns:
      The audit.
    """
    lines = next(module.schedules()).lines
    messages = tuple(task.name for task in sends)
    # Beside them a loss may hold gathers of buckets.
    gathers = [f"gather {k}" for k in range(len(plan.buckets))]
    works = [(line, work(module, line, computation)) for line, computation in lines]
    return Audit(
        where=where,
        plan=plan,
        collectives=collectives,
        messages=messages,
        carries=carried(collectives, [*messages, *gathers]),
        within=within,
        heavy=sum(len(found) for _, found in works),
        flops=sum(one.flops for _, found in works for one in found),
        looped=sum(one.flops for line, found in works if line.opcode == "while" for one in found),
        timeline=None if target is None else estimate(module, collectives, target),
    )


def _told(plain: Plain) -> str:
    line = plain.timeline
    return (
        f"beside: {plain.way}: {1e3 * line.seconds:.2f} ms a step, {1e3 * line.exposed:.2f} exposed, "
        f"{plain.asynchronous} of {plain.collectives} asynchronous"
    )


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    dtype = getattr(x, "dtype", None) or jnp.result_type(x)
    # NumPy's float64 is JAX's float32, unless that was told to go on in 64 bits; JAX 0.11 warns of what it shortens.
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype if extended else jax.dtypes.canonicalize_dtype(dtype))
