"""Statistics as DDP logs them: who trains with whom, what travels in which order, and how long it took lately.

Also the bytes that one replica holds and sends, which are fewer in shards.

Source: `DDPLoggingData` in PyTorch's `logger.cpp`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from fddp.buckets import MiB, whole_forms
from fddp.comm import shortened
from fddp.schedules import Timeline
from fddp.step import TrainState, check_step
from fddp.wording import preformatted, table

if TYPE_CHECKING:  # a step measures itself
    from fddp.training import TrainStep


class Held(NamedTuple):
    """Bytes of a state, field by field."""

    params: int
    opt_state: int
    model_state: int
    hook_state: int
    accumulated: int
    """Sums that `no_sync` leaves pending; 0 as long as no call was given any."""


class ReplicaBytes(NamedTuple):
    """Bytes that one replica holds and sends; `print` shows them as a table."""

    held: Held
    """Bytes of the state between steps; with shards schedule "eager" also holds the gathered values of the next one."""
    whole: Held
    """The same without shards."""
    gradients: int
    """The most in a step, but for sums over micro-batches: all that travel are whole until the first message leaves."""
    sent: int | None
    """Bytes of the last step's messages, there and back, with loss and metrics; None: there was no step."""

    def __str__(self) -> str:
        names = ("parameters", "optimizer's state", "buffers", "memory of the hook", "accumulated")
        rows = [*zip(names, self.held, self.whole), ("gradients in a step", self.gradients, None)]
        rows += [("messages of a step", self.sent, None)]
        head = f"{'bytes of one replica':<20}  {'held':>15}  {'without shards':>15}"
        return "\n".join([head, *(f"{name:<20}  {_told(held)}  {_told(whole)}".rstrip() for name, held, whole in rows)])

    _repr_html_ = preformatted


@dataclass(frozen=True)
class Stats:
    """Statistics as DDP logs them (`_get_ddp_logging_data`), by its names where they mean the same; times in seconds.

    The averages are over the last steps of a schedule that runs several programs, and None under "fused", where only a
    profiler sees them: `step.measure(state, batches)`.
    """

    world_size: int
    """The number of replicas."""
    rank: int
    """This process's number."""
    backend_name: str
    """"nccl", "gloo", "mpi" or "local"."""
    iteration: int
    """Steps that this object has run."""
    skipped_steps: int
    """Those of them that changed nothing (`info.skipped`), as far as they have ended."""
    watchers_said: str
    """The last finding of the watchers of all ranks, a straggler, say; empty if there is none (`docs/faults.md`)."""
    num_parameter_tensors: int
    """Leaves of the parameters' tree."""
    total_parameter_size_bytes: int
    """Their bytes."""
    bucket_cap_bytes: float | tuple[float, ...]
    """The option `bucket_cap_mb`, in bytes; several if it has the cap of each bucket in turn."""
    bucket_sizes: tuple[int, ...]
    """Bytes of each bucket, in the order in which they leave."""
    grad_ready_order: tuple[str, ...]
    """Names of the leaves that travel, in the order in which their gradients become ready."""
    find_unused_parameters: bool
    """The option of that name."""
    broadcast_buffers: bool | str
    """The option of that name."""
    hook: str
    """The name of the hook, with the bits of each bucket if it is adaptive; "" for plain sums."""
    replica_bytes: ReplicaBytes
    """The bytes that one replica holds and sends."""
    peak_bytes: int | None
    """The most memory that a step of one replica needs at once, as XLA plans it: state, rows, activations, gradients,
    messages and their sums, but not what carries them. None: there was no step, or it is not known (`after`)."""
    avg_first_stage_time: float | None
    """The first program: the forward pass, and the backward pass until the first bucket is full."""
    avg_backward_compute_time: float | None
    """The rest of the backward pass: all stages but the first."""
    avg_backward_comm_time: float | None
    """All-reduces."""
    avg_backward_compute_comm_overlap_time: float | None
    """The part of the all-reduces that lay under computation."""

    def __str__(self) -> str:
        named = [field.name for field in fields(self) if field.name != "replica_bytes"]
        rows = [(name, _shown(name, getattr(self, name))) for name in named]
        return "\n".join([*table(rows), str(self.replica_bytes)])

    _repr_html_ = preformatted


def stats(step: "TrainStep") -> Stats:
    """Sums up what a step is and how its last runs went.

    Args:
      step: from `train_step`, with a state.

    Returns:
      The numbers. Those of bytes wait for the last step.
    """
    check_step("fddp.stats", step)
    group = step.group
    options = step.options
    plan = step.plan
    lines = step.lately
    cap = options.bucket_cap_mb

    def average(seconds: Callable[[Timeline], float]) -> float | None:
        return sum(map(seconds, lines)) / len(lines) if lines else None

    return Stats(
        world_size=group.size,
        rank=group.rank,
        backend_name=group.backend,
        iteration=step.steps,
        skipped_steps=step.skips.count,
        watchers_said=group.journal.finding().words,
        num_parameter_tensors=len(plan.leaves),
        total_parameter_size_bytes=sum(leaf.nbytes for leaf in plan.leaves),
        bucket_cap_bytes=cap * MiB if isinstance(cap, int | float) else tuple(one * MiB for one in cap),
        bucket_sizes=tuple(bucket.nbytes for bucket in plan.buckets),
        grad_ready_order=tuple(name for bucket in plan.buckets for name in bucket.names),
        find_unused_parameters=options.find_unused_parameters,
        broadcast_buffers=options.broadcast_buffers,
        hook=options.hook.name if options.hook else "",
        replica_bytes=_replica_bytes(step),
        peak_bytes=_peak_bytes(step),
        avg_first_stage_time=average(lambda line: sum(span.seconds for span in line.compute[:1])),
        avg_backward_compute_time=average(lambda line: sum(span.seconds for span in line.compute[1:])),
        avg_backward_comm_time=average(lambda line: line.communicating),
        avg_backward_compute_comm_overlap_time=average(
            lambda line: Timeline((*line.compute, *line.communication)).overlap
        ),
    )


def _replica_bytes(step: "TrainStep") -> ReplicaBytes:
    plan = step.plan
    held = step.held
    gradients = sum(leaf.nbytes for bucket in plan.buckets for leaf in plan.travelling(bucket)) + plan.padding
    sent = None if step.sent is None else int(np.asarray(step.sent).sum(dtype=np.uint64))
    return ReplicaBytes(_held(held), _held(whole_forms(held)), gradients, sent)


def _peak_bytes(step: "TrainStep") -> int | None:
    first = step.settled.first if step.steps else ()
    found = step.settled.runner.footprint(*first) if first else None
    return found.peak if found else None


def _held(state: TrainState) -> Held:
    def nbytes(tree: object) -> int:
        return sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    return Held(*(nbytes(getattr(state, name)) for name in Held._fields))


def _shown(name: str, value: object) -> str:
    """A value of the statistics in a table."""
    if isinstance(value, tuple):
        return shortened([_shown(name, x) for x in value], ", ")
    if isinstance(value, float) and name.endswith("_time"):
        return f"{1e3 * value:.2f} ms"
    return f"{value:,.0f}" if "bytes" in name and isinstance(value, int | float) else str(value) or "-"


def _told(count: int | None) -> str:
    return " " * 15 if count is None else f"{count:>15,}"
