"""Reports the collectives in a compiled step's schedule, and the computation that overlaps them.

Source: Li et al. (VLDB 2020), Fig. 6, from the program in place of a profile.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from fddp.analysis.targets import target_group
from fddp.buckets import BucketPlan, MiB, whole_forms
from fddp.comm import Group, forms_of
from fddp.jax_internals import (
    Collective,
    Module,
    compile_to_read,
    find_collectives,
    heavy_operations,
    parse,
)
from fddp.step import TrainState, check_state, check_step
from fddp.step.schedules import scope
from fddp.training import TrainStep
from fddp.wording import preformatted, table

HEAD = ("starts", "carries", "kind", "MiB", "dtype", "mode", "heavy operations in flight")


class Memory(NamedTuple):
    """The bytes of a step on one device, as XLA plans them."""

    resident: int
    """Bytes of the state and the rows."""
    peak: int
    """Bytes at a step's peak: these, activations, gradients, messages, gathered parameters."""

    def __str__(self) -> str:
        return (
            f"{self.resident / MiB:.1f} MiB of state and rows, "
            f"{self.peak / MiB:.1f} MiB at a step's peak"
        )


@dataclass(frozen=True)
class Audit:
    """A step's compiled program compared with its plan; `print(audit)` shows a table."""

    where: str
    """The target, or the platform of the step's devices."""
    plan: BucketPlan
    """The planned buckets."""
    messages: tuple[str, ...]
    """Names of the planned messages, in order: "bucket 0", "tail"."""
    collectives: tuple[Collective, ...]
    """The program's collectives, in start order; those in loops and branches last."""
    carries: tuple[str | None, ...]
    """The message of each collective; None for collectives of the loss, and for merged ones."""
    heavy: int
    """Number of matrix products and convolutions in a step."""
    memory: Memory | None = None
    """Bytes of a step on a device; None if the platform does not report them."""

    def label(self, k: int) -> str:
        """Returns a label for the payload of a collective.

        Args:
          k: index of the collective.

        Returns:
          "bucket 2", "tail", "merged" or "other".
        """
        if self.carries[k] is None and self.collectives[k].merged:
            return "merged"
        return self.carries[k] or "other"

    def problems(self) -> tuple[str, ...]:
        """Describes each deviation from the plan, and exposed traffic.

        Returns:
          The problems; empty if the traffic is hidden as planned.
        """
        return tuple(_problems(self))

    def __str__(self) -> str:
        rows = list[Sequence[str]]([HEAD])
        for k, op in enumerate(self.collectives):
            dtype = "+".join(sorted({array.dtype for array in op.arrays}))
            mib = f"{op.nbytes / MiB:.3f}"
            rows.append((str(k), self.label(k), op.kind, mib, dtype, _mode(op), str(op.heavy)))
        ops = self.collectives
        planned = sum(bucket.nbytes for bucket in self.plan.buckets) / MiB
        lines = [
            *table(rows),
            f"{self.where}: {sum(op.rounds * op.asynchronous for op in ops)} of "
            f"{sum(op.rounds for op in ops)} collectives asynchronous, "
            f"{sum(op.rounds * op.nbytes for op in ops) / MiB:.3f} MiB; "
            f"{self.heavy} heavy operations",
            f"planned: {len(self.plan.buckets)} buckets, {planned:.3f} MiB",
        ]
        if self.memory:
            lines.append(f"memory of a device: {self.memory}")
        lines += [f"problem: {problem}" for problem in self.problems()] or ["no problem found"]
        return "\n".join(lines)

    _repr_html_ = preformatted


def audit(step: TrainStep, state: TrainState, batch: PyTree, target: str | None = None) -> Audit:
    """Inspects XLA's program of a step: each all-reduce, and the computation that overlaps it.

    Nothing runs. With a target it compiles ahead of time for GPUs that need not be attached.

    Args:
      step: from `train_step`; it must be one program.
      state: the step's state, or its shapes (`jax.ShapeDtypeStruct`).
      batch: as for a step; with a target, the rows of all its replicas. Shapes suffice.
      target: "h100:8" for eight H100s in one host, "a100:2x8" for two hosts of eight A100s,
        "h200:4"; None for the step's own devices.

    Returns:
      An `Audit`. See also its `problems()`.

    Raises:
      ValueError: an unknown target, a step of several programs, or one between CPU processes
        without a target: its messages are not XLA's.
      RuntimeError: the compiler for the target is not installed.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> state = step.init(jnp.ones((4, 2)))
      >>> fddp.audit(step, state, jnp.ones((8, 4))).plan.buckets[0].names
      ('',)
    """
    check_step("fddp.audit", step)
    where = jax.default_backend()
    if target is not None:
        step, state, batch = _moved(step, state, batch, target_group(target))
        where = target
    elif step.group.transport.in_lanes or (step.group.backend == "mpi" and step.group.size > 1):
        raise ValueError(
            "an audit reads XLA's collectives, and cannot read messages between CPU processes; "
            "give a target, fddp.audit(…, target='h100:8')."
        )
    compiled = compile_to_read(step.lower(state, batch))
    messages = step.settled.runner.messages
    module = parse(compiled.as_text() or "")
    return read(module, messages, step.plan, where, _memory(compiled))


def read(
    module: Module,
    messages: Sequence[str],
    plan: BucketPlan,
    where: str,
    memory: Memory | None = None,
) -> Audit:
    """Returns the audit of a compiled program with these planned messages."""
    collectives = find_collectives(module)
    gathers = [f"gather {k}" for k in range(len(plan.buckets))]  # a loss may gather them as well
    return Audit(
        where=where,
        plan=plan,
        messages=tuple(messages),
        collectives=collectives,
        carries=_carried(collectives, [*messages, *gathers]),
        heavy=sum(heavy_operations(module, line) for line, _ in next(module.schedules()).lines),
        memory=memory,
    )


def _moved(step: TrainStep, state: TrainState, batch: PyTree, group: Group) -> Any:
    """Moves a step to a target, with the shapes of its state and of all replicas' rows."""
    check_state(state)
    step = step.on(group)
    state, batch = forms_of((state, batch))
    params, model_state = whole_forms((state.params, state.model_state))
    return step, step.shapes(params, model_state=model_state, rng=state.rng), batch


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    plan: Any = compiled.memory_analysis()
    if plan is None:
        return None
    resident = plan.argument_size_in_bytes
    # An output that overwrites an argument needs no memory of its own.
    outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return Memory(resident, resident + plan.temp_size_in_bytes + outputs)


def _carried(collectives: Sequence[Collective], names: Iterable[str]) -> tuple[str | None, ...]:
    """The message of each collective, from its named scope: XLA retains one of merged scopes."""
    scopes = {scope(name): name for name in names}
    named = re.compile(rf"\b({'|'.join(scopes)})\b")
    matches = [None if op.merged else named.search(op.op_name) for op in collectives]
    return tuple(match and scopes[match[1]] for match in matches)


def _mode(op: Collective) -> str:
    """Describes if a collective is asynchronous, and the loop or branch around it."""
    mode = "asynchronous" if op.asynchronous else "synchronous"
    if op.loops:
        mode += f", in {op.rounds} rounds of a loop"
    elif op.branches:
        mode += ", in a branch"
    return mode + ", registered" * op.registered


def _problems(audit: Audit) -> Iterator[str]:
    ops = audit.collectives
    sent = [k for k in range(len(ops)) if audit.label(k) != "other"]
    if not sent:
        yield "nothing is sent: this step has one replica, or its replicas train alone."
        return
    for k in range(len(ops)):
        if ops[k].merged:
            mib = f"{ops[k].nbytes / MiB:.1f} MiB"
            yield f"merged: XLA made one {ops[k].kind} of {len(ops[k].arrays)}, {mib}."
        if ops[k].loops and not ops[k].heavy:
            yield (
                f"in a loop: {ops[k].op_name or ops[k].kind} ({audit.label(k)}) is sent in each of "
                f"{ops[k].rounds} rounds, and no heavy operation overlaps with it."
            )
    carried = [message for message in audit.carries if message is not None]
    missing = [message for message in audit.messages if message not in carried]
    if missing and not any(ops[k].merged for k in sent):
        yield f"not as planned: no collective carries {', '.join(missing)}."
    # A branch sends such a bucket whole if its table rows are too many. The messages of a loop
    # start at its place, but XLA may send the last round after the loop.
    rows = {f"bucket {k}" for k, bucket in enumerate(audit.plan.buckets) if bucket.rows}
    looped = {audit.carries[k] for k in sent if ops[k].loops}
    ordered = [x for x in carried if x in audit.messages and x not in rows | looped]
    if ordered != sorted(ordered, key=audit.messages.index):
        yield f"out of order: messages start in the order {', '.join(ordered)}."
    branched = {audit.label(k) for k in sent if ops[k].branches} - rows
    if branched:
        yield f"in a branch: {', '.join(sorted(branched))}: XLA overlaps nothing with it."
    outside = [
        k
        for k in sent
        if audit.carries[k] not in (None, "tail", *looped) and not ops[k].loops + ops[k].branches
    ]
    bare = [k for k in outside if not ops[k].heavy]
    if len(bare) > max(1, len(outside) // 2) or bare == outside != []:
        labels = ", ".join(dict.fromkeys(map(audit.label, bare)))
        yield (
            f"exposed: no heavy operation overlaps with {labels}, "
            f"{sum(ops[k].nbytes for k in bare) / MiB:.1f} MiB. Smaller buckets or more rows may "
            "help; XLA:CPU overlaps nothing inside a program."
        )
