"""Programs that fddp compiles ahead of time for GPUs of this kind; it uses none of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import fddp
from bench.on_gpu.machine import CAP_MB, RANKED, Machine
from fddp.analysis.auditing import device_memory
from fddp.analysis.auditing.report import Audit
from fddp.analysis.auditing.targets import read_target
from fddp.analysis.workload import find_workload
from fddp.buckets import MiB
from fddp.schedules import of_one_program

SHARDS = (None, "optimizer", "state")
REPLICAS = 8


def measures(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Audits the step of the part `ranks`, and reads the memory of a state in shards on eight
    replicas."""
    if machine.chip is None:
        return {}
    name = machine.held
    memory = {
        f"{name}, shard={shard!r}": partial(memory_of, name, machine.chip, shard)
        for shard in SHARDS
    }
    return {RANKED: partial(audited, RANKED, f"{machine.chip}:{machine.ranks}"), **memory}


def audited(name: str, where: str) -> dict[str, Any]:
    """Audits the step of the ranks, for a model as module:preset:rows."""
    workload, target = _read(name, where)
    options = {"schedule": "fused", "bucket_cap_mb": CAP_MB}
    step, state, batch = workload.forms(target.group(), **options)
    return {"target": where, **audit_figures(fddp.audit(step, state, batch, where))}


def memory_of(name: str, chip: str, shard: Any) -> dict[str, Any]:
    """Reads the memory of each of eight GPUs off a compiled program, for a model as
    module:preset:rows."""
    workload, target = _read(name, f"{chip}:{REPLICAS}")
    step, state, batch = workload.forms(target.group(), schedule="fused", shard=shard)
    lowered = step.lower(state, batch)
    return {"target": target.name, **allocated(lowered)}


def allocated(lowered: Any) -> dict[str, float]:
    """XLA's figures of a program's memory in MiB: arguments, and its other allocations."""
    memory = device_memory.memory_of(of_one_program(lowered.compile()))
    assert memory is not None  # XLA reports it for GPUs
    return {"arguments_MiB": memory.given / MiB, "more_MiB": memory.more / MiB}


def audit_figures(audit: Audit) -> dict[str, Any]:
    """An audit, as JSON can hold it."""
    return {
        "buckets": len(audit.plan.buckets),
        "collectives": len(audit.collectives),
        "asynchronous": sum(collective.asynchronous for collective in audit.collectives),
        "starts": [audit.label(k) for k in range(len(audit.collectives))],
        "heavy_in_flight": [collective.heavy for collective in audit.collectives],
        "heavy": audit.heavy,
        "GFLOP": audit.flops / 1e9,
        "problems": list(audit.problems()),
    }


def tell(figures: dict[str, Any]) -> str:
    """The figures in words."""
    if "arguments_MiB" in figures:
        needs = (
            f"{figures['arguments_MiB']:.2f} MiB of arguments and {figures['more_MiB']:.2f} beside "
            f"them"
        )
        return f"{needs} on each of {figures['target']}"
    return program_words(figures)


def program_words(figures: dict[str, Any]) -> str:
    """The results of an audit, in words."""
    return (
        f"{figures['asynchronous']} of {figures['collectives']} collectives asynchronous, "
        f"{figures['buckets']} buckets "
        f"planned, {figures['heavy']} heavy operations; started: {', '.join(figures['starts'])}"
    )


def _read(name: str, where: str) -> tuple[Any, Any]:
    target = read_target(where)
    workload, _, rows = name.rpartition(":")
    return find_workload(f"models.{workload}")(int(rows), target.size, shapes=True), target
