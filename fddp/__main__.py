"""python -m fddp: look at a step before it runs, and while it does."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import optax
from jaxtyping import PyTree

import fddp
from fddp.analysis.auditing.device_memory import memory_table
from fddp.analysis.auditing.targets import read_target
from fddp.analysis.doctor import examine, installed
from fddp.analysis.reproduction import reproduce
from fddp.analysis.tuning.tune import tune_model
from fddp.analysis.workload import make_workload, read_model, read_workload
from fddp.buckets import place_scalars
from fddp.runtime.commands import add_flight, add_run
from fddp.step import Shared

CAPS = ("bucket_cap_mb", "first_bucket_mb", "last_bucket_mb")


def main(argv: Sequence[str]) -> int:
    """Runs a subcommand; returns 0, 1 if an audit finds problems or bits differ, 2 on an error."""
    parser = argparse.ArgumentParser(
        prog="python -m fddp",
        description="Look at a data-parallel step, before it runs and while it does.",
    )
    parser.add_argument(
        "--version", action="version", version=f"fddp {installed('fddp') or '(a checkout)'}"
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in ADD:
        add(commands)
    args = parser.parse_args(argv)
    # These commands run nothing on a device, so they leave GPUs to other processes.
    compiles = args.run is run_plan or getattr(args, "target", None)
    if compiles and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    try:
        _check(args)
        return args.run(args)
    except (ValueError, RuntimeError, ModuleNotFoundError, OSError) as error:
        print(f"python -m fddp: {error}", file=sys.stderr)
        return 2


### plan: which gradient travels in which bucket


def add_plan(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("plan", help="print the assignment of gradients to buckets")
    _add_model(parser)
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    workload = read_workload(args.model, args.rows)

    def loss(params: PyTree, batch: PyTree, model_state: PyTree) -> Any:
        if model_state is None:
            return workload.loss_fn(params, batch)
        return workload.loss_fn(params, batch, model_state=model_state)

    order = fddp.grad_order(loss, workload.params, workload.batch, workload.model_state)
    plan = fddp.make_plan(workload.params, order=order, **_caps(args))
    print(place_scalars(plan, early=True))  # as a step does
    return 0


### audit: does it overlap?


def add_audit(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "audit", help="compile a step for GPUs that need not be installed, and report its overlap"
    )
    _add_model(parser)
    parser.add_argument(
        "--target",
        default="h100:8",
        help="a100:N, h100:N, h200:N, or h100:2x8 for two hosts of eight",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the estimated schedule")
    parser.add_argument(
        "--shard",
        choices=get_args(Shared),
        help="share the state, and compare the memory of all layouts",
    )
    parser.set_defaults(run=run_audit)


def run_audit(args: argparse.Namespace) -> int:
    target = read_target(args.target)
    workload = read_workload(args.model, args.rows * target.size)
    group = target.group()
    step, state = workload.step(group, shard=args.shard, **_caps(args))
    report = fddp.audit(step, state, workload.batch, args.target)
    print(report)
    if args.shard:
        caps = _caps(args)
        current = {"shard": args.shard}

        def audit(options: dict[str, Any]) -> fddp.Audit:
            if options == current:
                return report
            return fddp.audit(*workload.step(group, **options, **caps), workload.batch, target.name)

        print(memory_table(audit))
    if args.picture:
        report.picture(args.picture)
    return int(bool(report.problems()))


### measure and tune: where the time goes, and which bucket cap is best here; alone or under mpirun


def add_measure(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "measure", help="run a step and measure how it spends its time; also under mpirun"
    )
    _add_model(parser)
    parser.add_argument(
        "--steps", type=int, default=10, help="how many steps to measure (default 10)"
    )
    parser.add_argument("--trace", metavar="FILE", help="write the steps for ui.perfetto.dev")
    parser.add_argument("--picture", metavar="FILE", help="draw a typical step")
    parser.set_defaults(run=run_measure)


def run_measure(args: argparse.Namespace) -> int:
    read_model(args.model)  # before it waits for other processes
    group = fddp.init()
    rows = args.rows * group.size // group.processes
    loss_fn, params, model_state, batch = make_workload(args.model, rows, group.rank)
    options = {"group": group, "has_aux": True, **_caps(args)}
    step = fddp.train_step(loss_fn, optax.adamw(1e-3), **options)
    measurement = step.measure(step.init(params, model_state=model_state), [batch] * args.steps)
    group.print(measurement)
    if group.is_main and args.trace:
        measurement.trace(args.trace)
    if group.is_main and args.picture:
        measurement.picture(args.picture)
    return 0


def add_tune(commands: argparse._SubParsersAction) -> None:
    text = (
        "find the best bucket cap: on these hosts, under mpirun, one replica each; or for GPUs "
        "that need not be installed"
    )
    parser = commands.add_parser("tune", help=text)
    _add_model(parser, caps=())
    parser.add_argument(
        "--target",
        help="a100:N, h100:N, h200:N, or h100:2x8 for two hosts of eight (default: here)",
    )
    parser.set_defaults(run=run_tune)


def run_tune(args: argparse.Namespace) -> int:
    if args.target:
        target = read_target(args.target)
        workload = read_workload(args.model, args.rows * target.size)
        print(fddp.tune(*workload.step(target.group()), workload.batch, target=args.target))
        return 0
    group = fddp.init()
    group.print(tune_model(args.model, args.rows, group=group))
    return 0


### reproduce: the same bits on other numbers of replicas


def add_reproduce(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "reproduce", help="train on 1, 2 and 4 replicas and compare the bits"
    )
    parser.add_argument(
        "model", nargs="?", help="module:preset, such as models.gpt:tiny (default: a small net)"
    )
    parser.add_argument("--rows", type=int, default=4, help="rows of a virtual replica (default 4)")
    parser.add_argument("--steps", type=int, default=50, help="how many steps (default 50)")
    parser.add_argument("--replicas", default="1,2,4", help="numbers of replicas (default 1,2,4)")
    parser.set_defaults(run=run_reproduce)


def run_reproduce(args: argparse.Namespace) -> int:
    counts = [int(count) for count in args.replicas.split(",")]
    if min(counts) < 1:
        raise ValueError(f"--replicas must be 1 or more each, got {args.replicas}.")
    # A host without GPUs has a configurable number of devices.
    if jax.config.jax_num_cpu_devices < max(counts):  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", max(counts))
    reproduction = reproduce(args.model, args.steps, counts, args.rows)
    print(reproduction)
    return int(not reproduction.equal)


### doctor: what works here


def add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor", help="report what works in this installation, and remedies for problems"
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    del args
    for finding in examine():
        print(f"{finding.what:<22}  {finding.found}")
        if finding.advice:
            print(f"{'':<22}  → {finding.advice}")
    return 0


### What commands have in common


def _add_model(parser: argparse.ArgumentParser, caps: Sequence[str] = CAPS) -> None:
    parser.add_argument("model", help="module:preset, models.gpt:tiny say")
    parser.add_argument("--rows", type=int, default=8, help="rows of a replica (default 8)")
    for cap in caps:
        text = f"as of fddp.train_step (default {getattr(fddp.Options, cap)})"
        parser.add_argument(f"--{cap.replace('_', '-')}", type=float, metavar="MIB", help=text)


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for invalid options before the work starts; a command may lack some."""
    for name in ("rows", "steps"):
        if getattr(args, name, 1) < 1:
            raise ValueError(f"--{name} must be 1 or more, got {getattr(args, name)}.")
    for name in ("picture", "trace"):
        folder = Path(getattr(args, name, None) or "").parent
        if not folder.is_dir():
            raise ValueError(f"--{name}: there is no folder {folder}.")


def _caps(args: argparse.Namespace) -> dict[str, Any]:
    caps = {cap: getattr(args, cap) for cap in CAPS}
    return {cap: mib for cap, mib in caps.items() if mib is not None}


ADD = (add_run, add_plan, add_audit, add_measure, add_tune, add_reproduce, add_flight, add_doctor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
