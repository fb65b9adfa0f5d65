"""Ranks over NCCL: the losses of one replica, the program of the audit, the memory of shared
states.

Where there is one GPU two ranks share it. Their times then say nothing of a job with a GPU for each
rank.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import fddp
from bench.on_gpu.ahead import SHARDS, allocated, audit_figures, program_words
from bench.on_gpu.machine import CAP_MB, RANKED, Machine, shared
from bench.workload import Workload, read

STEPS = 10
LOSS = 1e-4  # float32, after some steps of AdamW


def on_ranks(machine: Machine, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a function on all ranks, each a process; returns the results in order of rank."""
    os.environ.update(shared(machine, os.environ))
    return fddp.launch(fn, machine.ranks, *args)


### The losses of one replica, and the program


def measures_of_training(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Trains on all ranks and on one of them alone, on the rows of all."""
    return {RANKED: lambda: on_ranks(machine, train)[0]}


def train() -> dict[str, Any]:
    """Does one rank's part; returns figures that are equal on all ranks, except for the losses."""
    group = fddp.init()
    workload = read(RANKED, group.size)
    local_rows = _rows_of(workload.batch, group.rank, group.processes)
    optimizer = optax.adamw(1e-3)

    def losses(**options: Any) -> list[float]:
        step, state = workload.step(optimizer, **options)
        rows = local_rows if options["group"] is group else workload.batch
        values = []
        for _ in range(STEPS):
            state, info = step(state, rows)
            values.append(float(info.loss))
        return values

    with jax.default_matmul_precision("highest"):
        together = losses(group=group, bucket_cap_mb=CAP_MB)
        single = losses(group=group.subgroup([group.rank]))
    step, state = workload.step(optimizer, group=group, bucket_cap_mb=CAP_MB)
    # An audit cannot read messages between CPU processes: a rehearsal reads GPUs' program.
    target = f"h100:{group.size}" if jax.default_backend() == "cpu" else None
    program = audit_figures(fddp.audit(step, state, local_rows, target))
    distance = float(np.max(np.abs(np.subtract(together, single)) / np.abs(single)))
    figures = {
        "ranks": group.size,
        "backend": group.backend,
        "losses": together,
        "alone": single,
        "largest_difference": distance,
        "program": program,
    }
    if distance > LOSS:
        figures["wrong"] = f"losses differ from one replica's by {distance:.1e} of them"
    return figures


def tell_training(figures: dict[str, Any]) -> str:
    """The figures in words."""
    return (
        f"{figures['ranks']} ranks over {figures['backend']}: losses of {len(figures['losses'])} "
        f"steps within "
        f"{figures['largest_difference']:.1e} of one replica's; {program_words(figures['program'])}"
    )


### The memory of a shared state


def measures_of_memory(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Trains with each kind of `shard`, in fresh processes: nothing sets a device's peak back."""
    name = machine.held
    return {
        f"{name}, shard={shard!r}": lambda shard=shard: on_ranks(machine, use, name, shard)[0]
        for shard in SHARDS
    }


def use(name: str, shard: Any) -> dict[str, Any]:
    """One rank's part: figures of its device, for a model as module:preset:rows of a replica."""
    group = fddp.init()
    workload = read(name, group.size)
    local_rows = _rows_of(workload.batch, group.rank, group.processes)
    step, state = workload.step(optax.adamw(1e-3), group=group, shard=shard)
    workload = Workload(workload.loss_fn, None, None, None)  # the first parameters would count
    state, _ = step(state, local_rows)
    state, info = step(state, local_rows)
    jax.block_until_ready((state, info))
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    state_bytes = sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards)
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {
        "ranks": group.size,
        "state_MiB": state_bytes / 2**20,
        **allocated(step.lower(state, local_rows)),
        "peak_MiB": None if peak is None else peak / 2**20,
        **({} if np.isfinite(float(info.loss)) else {"wrong": "the loss is not finite"}),
    }


def tell_memory(figures: dict[str, Any]) -> str:
    """The figures in words."""
    peak = figures["peak_MiB"]
    measured = "the device tells no peak" if peak is None else f"the device's peak is {peak:.1f}"
    return (
        f"of {figures['ranks']} ranks each holds {figures['state_MiB']:.2f} MiB of state; the step "
        f"has "
        f"{figures['arguments_MiB']:.2f} of arguments and {figures['more_MiB']:.2f} beside them; "
        f"{measured}"
    )


def _rows_of(batch: Any, rank: int, processes: int) -> Any:
    """A process's own rows."""

    def cut(x: Any) -> Any:
        rows = len(x) // processes
        return x[rank * rows : (rank + 1) * rows]

    return jax.tree.map(cut, batch)
