"""Programs that fddp compiles ahead of time for GPUs of this kind; it uses none of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optax

import fddp
from bench.on_gpu.machine import CAP_MB, RANKED, Machine
from bench.workload import shapes
from fddp.analysis.audit import Audit
from fddp.analysis.targets import target_group
from fddp.buckets import MiB

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
    step, state, batch = _forms(name, where, bucket_cap_mb=CAP_MB)
    return {"target": where, **audit_figures(fddp.audit(step, state, batch, where))}


def memory_of(name: str, chip: str, shard: Any) -> dict[str, Any]:
    """Reads the memory of each of eight GPUs off a compiled program, for a model as
    module:preset:rows."""
    target = f"{chip}:{REPLICAS}"
    step, state, batch = _forms(name, target, shard=shard)
    return {"target": target, **allocated(step.lower(state, batch))}


def allocated(lowered: Any) -> dict[str, float]:
    """XLA's figures of a program's memory in MiB: arguments, and its other allocations."""
    plan = lowered.compile().memory_analysis()
    more = plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return {"arguments_MiB": plan.argument_size_in_bytes / MiB, "more_MiB": more / MiB}


def audit_figures(audit: Audit) -> dict[str, Any]:
    """An audit, as JSON can hold it."""
    return {
        "buckets": len(audit.plan.buckets),
        "collectives": len(audit.collectives),
        "asynchronous": sum(collective.asynchronous for collective in audit.collectives),
        "starts": [audit.label(k) for k in range(len(audit.collectives))],
        "heavy_in_flight": [collective.heavy for collective in audit.collectives],
        "heavy": audit.heavy,
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


def _forms(name: str, where: str, **options: Any) -> tuple[Any, Any, Any]:
    """A step for a target, with the shapes of its state and of all replicas' rows."""
    group = target_group(where)
    workload = shapes(name, group.size)
    settings = {"group": group, "has_aux": True, **options}
    step = fddp.train_step(workload.loss_fn, optax.adamw(1e-3), **settings)
    state = step.shapes(workload.params, model_state=workload.model_state)
    return step, state, workload.batch
