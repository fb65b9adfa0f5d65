"""Statistics as in DDP's log: group, buckets, recent times, and the bytes of a replica.

Source: `DDPLoggingData` in PyTorch's `logger.cpp`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from fddp.buckets import MiB, whole_forms
from fddp.comm import shortened
from fddp.schedules import Timeline
from fddp.step import TrainState, check_step
from fddp.wording import preformatted, table

if TYPE_CHECKING:  # a step has a `stats` method
    from fddp.training import TrainStep


class Held(NamedTuple):
    """Bytes of the fields of a state."""

    params: int
    opt_state: int
    model_state: int
    hook_state: int
    accumulated: int
    """Pending sums of `no_sync`; 0 until a step receives some."""


class ReplicaBytes(NamedTuple):
    """Bytes of a replica's state, gradients and messages; `print` shows them as a table."""

    held: Held
    """Bytes of the state between steps."""
    whole: Held
    """Bytes of the state without shards."""
    gradients: int
    """Peak bytes of gradients in a step, except sums over micro-batches: no gradient is sharded
    before the first message leaves."""
    sent: int | None
    """Bytes of the last step's messages in both directions, including loss and metrics; None before
    the first step."""

    def __str__(self) -> str:
        names = ("parameters", "optimizer's state", "buffers", "memory of the hook", "accumulated")
        rows = [("bytes of one replica", f"{'held':>15}", f"{'without shards':>15}")]
        for name, nbytes, full in zip(names, self.held, self.whole):
            rows.append((name, f"{nbytes:>15,}", f"{full:>15,}"))
        rows.append(("gradients in a step", f"{self.gradients:>15,}", ""))
        rows.append(("messages of a step", "", ""))
        if self.sent is not None:
            rows[-1] = ("messages of a step", f"{self.sent:>15,}", "")
        return "\n".join(table(rows))

    _repr_html_ = preformatted


@dataclass(frozen=True)
class Stats:
    """Statistics as in DDP's log (`_get_ddp_logging_data`), with its names for equal meanings.

    Times are averages in seconds over the last steps of a schedule of several programs. They are
    None for one program ("fused"), where only a profiler can measure them:
    `step.measure(state, batches)`.
    """

    world_size: int
    """Number of replicas."""
    rank: int
    """This process's rank."""
    backend_name: str
    """"nccl", "gloo", "mpi" or "local"."""
    iteration: int
    """Number of steps of this object."""
    skipped_steps: int
    """Number of finished steps without an update (`info.skipped`)."""
    watchers_said: str
    """Last finding of the watchers of all ranks, such as a straggler; may be empty
    (`docs/faults.md`)."""
    num_parameter_tensors: int
    """Number of leaves of the parameters."""
    total_parameter_size_bytes: int
    """Bytes of the parameters."""
    bucket_cap_bytes: float | tuple[float, ...]
    """The option `bucket_cap_mb` in bytes; a tuple if the option lists the caps of buckets."""
    bucket_sizes: tuple[int, ...]
    """Bytes of each bucket, in launch order."""
    grad_ready_order: tuple[str, ...]
    """Names of the leaves in buckets, in the order of their gradients' readiness."""
    find_unused_parameters: bool
    """The option `find_unused_parameters`."""
    broadcast_buffers: bool | str
    """The option `broadcast_buffers`."""
    hook: str
    """Name of the hook, with the bits of each bucket if it is adaptive; "" without a hook."""
    replica_bytes: ReplicaBytes
    """Bytes of a replica's state, gradients and messages."""
    peak_bytes: int | None
    """Peak memory of a replica's step, as XLA plans it: state, rows, activations, gradients,
    messages and their sums, without the buffers of the transport. None before the first step, and
    if unknown (`after`)."""
    avg_first_stage_time: float | None
    """The first program: the forward pass, and the backward pass until the first bucket is full."""
    avg_backward_compute_time: float | None
    """The rest of the backward pass: all stages except the first."""
    avg_backward_comm_time: float | None
    """Time with all-reduces pending."""
    avg_backward_compute_comm_overlap_time: float | None
    """The part of the all-reduces that computation overlaps."""

    def __str__(self) -> str:
        named = [field.name for field in fields(self) if field.name != "replica_bytes"]
        rows = [(name, _shown(name, getattr(self, name))) for name in named]
        return "\n".join([*table(rows), str(self.replica_bytes)])

    _repr_html_ = preformatted


def stats(step: "TrainStep") -> Stats:
    """Returns the statistics of a step: its group, plan, memory and recent times.

    Args:
      step: from `train_step`, after `step.init`.

    Returns:
      The statistics. The call waits for the last step, to count its bytes.
    """
    check_step("fddp.stats", step)
    group = step.group
    options = step.options
    plan = step.plan
    lines = step.lately
    hook = ""
    if options.hook:
        hook = options.hook.name

    def average(seconds: Callable[[Timeline], float]) -> float | None:
        if not lines:
            return None
        return sum(map(seconds, lines)) / len(lines)

    return Stats(
        world_size=group.size,
        rank=group.rank,
        backend_name=group.backend,
        iteration=step.steps,
        skipped_steps=step.skips.count,
        watchers_said=group.journal.finding().words,
        num_parameter_tensors=len(plan.leaves),
        total_parameter_size_bytes=sum(leaf.nbytes for leaf in plan.leaves),
        bucket_cap_bytes=_bytes(options.bucket_cap_mb),
        bucket_sizes=tuple(bucket.nbytes for bucket in plan.buckets),
        grad_ready_order=tuple(name for bucket in plan.buckets for name in bucket.names),
        find_unused_parameters=options.find_unused_parameters,
        broadcast_buffers=options.broadcast_buffers,
        hook=hook,
        replica_bytes=_replica_bytes(step),
        peak_bytes=_peak_bytes(step),
        avg_first_stage_time=average(lambda line: sum(span.seconds for span in line.compute[:1])),
        avg_backward_compute_time=average(
            lambda line: sum(span.seconds for span in line.compute[1:])
        ),
        avg_backward_comm_time=average(lambda line: line.communicating),
        avg_backward_compute_comm_overlap_time=average(
            lambda line: Timeline((*line.compute, *line.communication)).overlap
        ),
    )


def _replica_bytes(step: "TrainStep") -> ReplicaBytes:
    plan = step.plan
    state = step.held
    gradients = plan.padding
    for bucket in plan.buckets:
        gradients += sum(leaf.nbytes for leaf in plan.travelling(bucket))
    traffic = None
    if step.sent is not None:
        traffic = int(np.asarray(step.sent).sum(dtype=np.uint64))
    return ReplicaBytes(_held(state), _held(whole_forms(state)), gradients, traffic)


def _peak_bytes(step: "TrainStep") -> int | None:
    if not (step.steps and step.settled.first):
        return None
    footprint = step.settled.runner.footprint(step.settled.first)
    return footprint and footprint.peak


def _held(state: TrainState) -> Held:
    return Held(*map(_nbytes, attrgetter(*Held._fields)(state)))


def _nbytes(tree: object) -> int:
    return sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _bytes(cap_mb: float | Sequence[float]) -> float | tuple[float, ...]:
    if isinstance(cap_mb, int | float):
        return cap_mb * MiB
    return tuple(cap * MiB for cap in cap_mb)


def _shown(name: str, value: object) -> str:
    """Formats a value of the statistics for a table."""
    if isinstance(value, tuple):
        return shortened([_shown(name, x) for x in value], ", ")
    if isinstance(value, float) and name.endswith("_time"):
        return f"{1e3 * value:.2f} ms"
    if isinstance(value, int | float) and "bytes" in name:
        return f"{value:,.0f}"
    return str(value) or "-"
