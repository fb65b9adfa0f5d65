"""python -m fddp: look at a step before it runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

import fddp
from fddp.doctor import examine
from fddp.targets import read_target
from fddp.workload import read_workload

CAPS = ("bucket_cap_mb", "first_bucket_mb", "last_bucket_mb")


def main(words: Sequence[str]) -> int:
    """Runs one subcommand.

    Args:
      words: the command line.

    Returns:
      The exit status: 0; 1 where something is wrong with the step or the installation; 2 for a wrong command line.
    """
    parser = argparse.ArgumentParser(prog="python -m fddp", description="Look at a data-parallel step before it runs.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in (add_plan, add_audit, add_doctor):
        add(commands)
    chosen = parser.parse_args(words)
    # Nothing here runs on a device, and a GPU that others use is left alone.
    if "JAX_PLATFORMS" not in os.environ and chosen.run is not run_doctor:
        jax.config.update("jax_platforms", "cpu")
    try:
        return chosen.run(chosen)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"python -m fddp: {error}", file=sys.stderr)
        return 2


### plan: which gradient travels in which bucket


def add_plan(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("plan", help="print which gradient travels in which bucket")
    _add_model(parser)
    parser.set_defaults(run=run_plan)


def run_plan(chosen: argparse.Namespace) -> int:
    workload = read_workload(chosen.model, chosen.rows)

    def loss(params: Any, batch: Any, model_state: Any) -> Any:
        state = {} if model_state is None else {"model_state": model_state}
        return workload.loss_fn(params, batch, **state)

    order = fddp.grad_order(loss, workload.params, workload.batch, workload.model_state)
    print(fddp.make_plan(workload.params, order=order, **_caps(chosen)))
    return 0


### audit: does it overlap?


def add_audit(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("audit", help="compile a step for GPUs that need not be here: does it overlap?")
    _add_model(parser)
    parser.add_argument("--target", default="h100:8", help="a100:N, h100:N, h200:N, or h100:2x8 for two hosts of eight")
    parser.add_argument("--picture", metavar="FILE", help="draw the estimated schedule")
    parser.set_defaults(run=run_audit)


def run_audit(chosen: argparse.Namespace) -> int:
    target = read_target(chosen.target)
    workload = read_workload(chosen.model, chosen.rows * target.size)
    step, state = workload.step(target.group(), **_caps(chosen))
    report = fddp.audit(step, state, workload.batch, chosen.target)
    print(report)
    if chosen.picture:
        report.picture(chosen.picture)
    return 1 if report.problems() else 0


### doctor: what works here


def add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("doctor", help="say what this installation can do, and what to do about the rest")
    parser.set_defaults(run=run_doctor)


def run_doctor(chosen: argparse.Namespace) -> int:
    del chosen
    for finding in examine():
        print(f"{finding.what:<22}  {finding.found}" + (f"\n{'':<22}  → {finding.advice}" if finding.advice else ""))
    return 0


### What commands have in common


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="module:preset, models.gpt:tiny say")
    parser.add_argument("--rows", type=int, default=8, help="rows of a replica (default 8)")
    for cap in CAPS:
        parser.add_argument(f"--{cap.replace('_', '-')}", type=float, metavar="MIB", help="as of fddp.train_step")


def _caps(chosen: argparse.Namespace) -> dict[str, float]:
    return {cap: getattr(chosen, cap) for cap in CAPS if getattr(chosen, cap) is not None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
