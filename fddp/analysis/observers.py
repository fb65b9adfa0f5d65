"""The commands of `python -m fddp` that observe a step, and `doctor`."""

import argparse
import os
from typing import Any

import jax

import fddp
from fddp.analysis.auditing.device_memory import memory_table
from fddp.analysis.auditing.targets import read_target
from fddp.analysis.doctor import examine
from fddp.analysis.reproduction import reproduce
from fddp.analysis.workload import OPTIMIZER, Workload, find_workload

CAPS = ("bucket_cap_mb", "first_bucket_mb", "last_bucket_mb")


def prepare(args: argparse.Namespace) -> None:
    """Leaves GPUs to other processes if the command runs nothing on a device."""
    if (args.name == "plan" or getattr(args, "target", None)) and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


def run_plan(args: argparse.Namespace) -> int:
    """Prints the buckets of a step."""
    group = fddp.mesh_group(jax.make_mesh((1,), ("replica",), devices=jax.devices()[:1]))
    step, *forms = find_workload(args.model)(args.rows, shapes=True).forms(group, **_caps(args))
    step.tasks(*forms)  # settles the plan
    print(step.plan)
    return 0


def run_audit(args: argparse.Namespace) -> int:
    """Audits a step that is compiled for a target; returns 1 if the audit finds problems."""
    target = read_target(args.target)
    workload = find_workload(args.model)(args.rows, target.size, shapes=True)
    group = target.group()
    current = {"shard": args.shard}
    report = fddp.audit(*workload.forms(group, **current, **_caps(args)), args.target)
    print(_head(args, workload, target.size))
    print(report)
    if args.shard:

        def audit(options: dict[str, Any]) -> fddp.Audit:
            if options == current:
                return report
            return fddp.audit(*workload.forms(group, **options, **_caps(args)), target.name)

        print(memory_table(audit))
    if args.picture:
        report.picture(args.picture)
    return int(bool(report.problems()))


def run_measure(args: argparse.Namespace) -> int:
    """Measures a step on the devices of this job."""
    make = find_workload(args.model)  # before it waits for other processes
    group = fddp.init()
    local = group.size // group.processes
    workload = make(args.rows, local, seed=group.rank)
    step = workload.step(group, **_caps(args))
    measurement = fddp.measure(step, workload.init(step), [workload.batch] * args.steps)
    group.print(_head(args, workload, local))
    group.print(measurement)
    if group.is_main and args.trace:
        measurement.trace(args.trace)
    if group.is_main and args.picture:
        measurement.picture(args.picture)
    return 0


def run_tune(args: argparse.Namespace) -> int:
    """Finds the best bucket cap and schedule, here or for a target."""
    make = find_workload(args.model)
    if args.target:
        target = read_target(args.target)
        group = target.group()
        replicas = target.size
        workload = make(args.rows, replicas, shapes=True)
        step, state, batch = workload.forms(group)
    else:
        group = fddp.init()
        replicas = group.size // group.processes
        workload = make(args.rows, replicas, seed=group.rank)
        step = workload.step(group)
        batch = workload.batch
        state = workload.init(step)
    tuning = fddp.tune(step, state, batch, args.target, caps_mb=args.caps, steps=args.steps)
    group.print(_head(args, workload, replicas))
    group.print(tuning)
    return 0


def run_reproduce(args: argparse.Namespace) -> int:
    """Trains on several numbers of replicas; returns 1 if the bits differ."""
    if min(args.replicas) < 1:
        raise ValueError(f"--replicas must be 1 or more each, got {args.replicas}.")
    # A host without GPUs has a configurable number of devices.
    config: Any = jax.config
    if config.jax_num_cpu_devices < max(args.replicas):
        config.update("jax_num_cpu_devices", max(args.replicas))
    reproduction = reproduce(args.model, args.steps, args.replicas, args.rows)
    print(reproduction)
    return int(not reproduction.equal)


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what works in this installation."""
    del args
    for finding in examine():
        print(f"{finding.what:<22}  {finding.found}")
        if finding.advice:
            print(f"{'':<22}  → {finding.advice}")
    return 0


def _head(args: argparse.Namespace, workload: Workload, replicas: int) -> str:
    """Names the workload, its rows and its optimizer."""
    rows = jax.tree.leaves(workload.batch)[0].shape[0] // replicas
    return f"{args.model}, {rows} rows per replica, {OPTIMIZER}"


def _caps(args: argparse.Namespace) -> dict[str, Any]:
    caps = {cap: getattr(args, cap) for cap in CAPS}
    return {cap: mib for cap, mib in caps.items() if mib is not None}
