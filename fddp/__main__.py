"""python -m fddp: look at a step before it runs, and while it does."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import jax
import optax

import fddp
from fddp.analysis.auditing.device_memory import memory_table
from fddp.analysis.auditing.targets import read_target
from fddp.analysis.doctor import examine, installed
from fddp.analysis.reproduction import reproduce
from fddp.analysis.tuning.by_name import tune_model
from fddp.analysis.workload import read_model, read_workload
from fddp.buckets import place_scalars
from fddp.runtime.mpi_vendors import loaded
from fddp.runtime.supervisor import Job, launcher, supervise
from fddp.step import Shared
from fddp.watching import read_flights, told

CAPS = ("bucket_cap_mb", "first_bucket_mb", "last_bucket_mb")


def main(words: Sequence[str]) -> int:
    """Runs one subcommand.

    Args:
      words: the command line.

    Returns:
      The exit status: 0; 1 where an audit has found problems, or bits differ; 2 for a wrong command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fddp", description="Look at a data-parallel step, before it runs and while it does."
    )
    parser.add_argument("--version", action="version", version=f"fddp {installed('fddp') or '(a checkout)'}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in (add_run, add_plan, add_audit, add_measure, add_tune, add_reproduce, add_flight, add_doctor):
        add(commands)
    chosen = parser.parse_args(words)
    # These run nothing on a device, and a GPU that others use is left alone.
    if "JAX_PLATFORMS" not in os.environ and (chosen.run is run_plan or getattr(chosen, "target", None)):
        jax.config.update("jax_platforms", "cpu")
    try:
        _check(chosen)
        return chosen.run(chosen)
    except (ValueError, RuntimeError, ModuleNotFoundError, OSError) as error:
        print(f"python -m fddp: {error}", file=sys.stderr)
        return 2


### run: a job that is started again when a rank fails


def add_run(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("run", help="start the ranks of a job, and start them again when one fails")
    parser.add_argument("-n", type=int, required=True, dest="ranks", help="how many processes")
    parser.add_argument("--hosts", default="", help="host1,host2,…: where, equally many on each (default: here)")
    parser.add_argument("--restarts", type=int, default=0, help="how often to start again (default 0)")
    parser.add_argument("--min", type=int, default=1, dest="least", help="not with fewer ranks than this (default 1)")
    told = "mpiexec, or processes of our own that meet over Gloo or NCCL (default: what is there)"
    parser.add_argument("--by", choices=("mpiexec", "processes"), help=told)
    parser.add_argument("-m", action="store_true", dest="module", help="what is run is a module, as of python -m")
    told = "a script of Python's and its arguments, train.py say; or after --: any command, python train.py say"
    parser.add_argument("command", nargs=argparse.REMAINDER, help=told)
    parser.set_defaults(run=run_run)


def run_run(chosen: argparse.Namespace) -> int:
    by = chosen.by or ("mpiexec" if chosen.hosts or find_spec("mpi4jax") else "processes")
    program = launcher(loaded()[0]) if by == "mpiexec" else None
    if chosen.by == "mpiexec" and program is None:
        raise ValueError("--by mpiexec: there is none here; install the extra 'mpi', or take --by processes.")
    hosts = [host for host in chosen.hosts.split(",") if host]
    command = read_command(chosen.command, module=chosen.module)
    return supervise(Job(command, chosen.ranks, hosts, chosen.restarts, chosen.least, program))


def read_command(words: Sequence[str], *, module: bool) -> list[str]:
    """The command that each rank runs: a script or a module is started by this Python, and shows its lines at once."""
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words:
        raise ValueError("run: what? Give a script, train.py say, or after -- a command, python train.py say.")
    python = [sys.executable, "-u"]
    if module:
        return [*python, "-m", *words]
    return [*python, *words] if words[0].endswith(".py") else words


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
    plan = fddp.make_plan(workload.params, order=order, **_caps(chosen))
    print(place_scalars(plan, early=True))  # as a step does
    return 0


### audit: does it overlap?


def add_audit(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("audit", help="compile a step for GPUs that need not be here: does it overlap?")
    _add_model(parser)
    parser.add_argument("--target", default="h100:8", help="a100:N, h100:N, h200:N, or h100:2x8 for two hosts of eight")
    parser.add_argument("--picture", metavar="FILE", help="draw the estimated schedule")
    parser.add_argument("--shard", choices=get_args(Shared), help="share the state, and compare the memory of all ways")
    parser.add_argument("--beside", choices=("jit",), help="compile plain JAX of the same loss and optimizer as well")
    parser.set_defaults(run=run_audit)


def run_audit(chosen: argparse.Namespace) -> int:
    target = read_target(chosen.target)
    workload = read_workload(chosen.model, chosen.rows * target.size)
    group = target.group()
    step, state = workload.step(group, shard=chosen.shard, **_caps(chosen))
    report = fddp.audit(step, state, workload.batch, chosen.target, beside=chosen.beside)
    print(report)
    if chosen.shard:
        caps = _caps(chosen)
        known = {"shard": chosen.shard}

        def audit(way: dict[str, Any]) -> Any:
            if way == known:
                return report
            return fddp.audit(*workload.step(group, **way, **caps), workload.batch, target.name)

        print(memory_table(audit))
    if chosen.picture:
        report.picture(chosen.picture)
    return 1 if report.problems() else 0


### measure and tune: where the time goes, and which bucket cap is best here; alone or under mpirun


def add_measure(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("measure", help="run a step and tell where its time goes; also under mpirun")
    _add_model(parser)
    parser.add_argument("--steps", type=int, default=10, help="how many steps to measure (default 10)")
    parser.add_argument("--trace", metavar="FILE", help="write the steps for ui.perfetto.dev")
    parser.add_argument("--picture", metavar="FILE", help="draw a typical step")
    parser.set_defaults(run=run_measure)


def run_measure(chosen: argparse.Namespace) -> int:
    module, preset = read_model(chosen.model)
    model = module.PRESETS[preset]
    group = fddp.init()
    batch = module.batch(model, chosen.rows * group.size // group.processes, group.rank)
    params, model_state = module.init(model, jax.random.key(0), batch)
    step = fddp.train_step(module.loss_fn(model), optax.adamw(1e-3), group=group, has_aux=True, **_caps(chosen))
    measured = step.measure(step.init(params, model_state=model_state), [batch] * chosen.steps)
    if group.is_main:
        print(measured)
        for path, write in ((chosen.trace, measured.trace), (chosen.picture, measured.picture)):
            if path:
                write(path)
    return 0


def add_tune(commands: argparse._SubParsersAction) -> None:
    told = "find the best bucket cap: on these hosts, under mpirun, one replica each; or for GPUs that need not be here"
    parser = commands.add_parser("tune", help=told)
    parser.add_argument("model", help="module:preset, models.resnet:50 say")
    parser.add_argument("--rows", type=int, default=8, help="rows of a replica (default 8)")
    parser.add_argument("--target", help="a100:N, h100:N, h200:N, or h100:2x8 for two hosts of eight (default: here)")
    parser.set_defaults(run=run_tune)


def run_tune(chosen: argparse.Namespace) -> int:
    if chosen.target:
        target = read_target(chosen.target)
        workload = read_workload(chosen.model, chosen.rows * target.size)
        print(fddp.tune(*workload.step(target.group()), workload.batch, target=chosen.target))
        return 0
    group = fddp.init()
    tuning = tune_model(*read_model(chosen.model), chosen.rows, group=group)
    group.print(tuning)
    return 0


### reproduce: the same bits on other numbers of replicas


def add_reproduce(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("reproduce", help="train on 1, 2 and 4 replicas and compare the bits")
    parser.add_argument("model", nargs="?", help="module:preset, models.gpt:tiny say (default: a small net)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a virtual replica (default 4)")
    parser.add_argument("--steps", type=int, default=50, help="how many steps (default 50)")
    parser.add_argument("--replicas", default="1,2,4", help="how many, each time (default 1,2,4)")
    parser.set_defaults(run=run_reproduce)


def run_reproduce(chosen: argparse.Namespace) -> int:
    replicas = [int(count) for count in chosen.replicas.split(",")]
    if min(replicas) < 1:
        raise ValueError(f"--replicas must be 1 or more each, got {chosen.replicas}.")
    # Where there is no GPU a host is as many devices as it is told to be.
    if jax.config.jax_num_cpu_devices < max(replicas):  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", max(replicas))
    found = reproduce(chosen.model, chosen.steps, replicas, chosen.rows)
    print(found)
    return 0 if found.equal else 1


### flight: what the ranks of a job that ended sent last


def add_flight(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("flight", help="say where the ranks of a job that ended first differ")
    parser.add_argument("records", nargs="+", help="the folder that the job named, or its files rank_*.json")
    parser.set_defaults(run=run_flight)


def run_flight(chosen: argparse.Namespace) -> int:
    print(told(read_flights(chosen.records)))
    return 0


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
        told = f"as of fddp.train_step (default {getattr(fddp.Options, cap)})"
        parser.add_argument(f"--{cap.replace('_', '-')}", type=float, metavar="MIB", help=told)


def _check(chosen: argparse.Namespace) -> None:
    """Refuses values that are known to be wrong before the work begins; a command may lack some of these options."""
    for name in ("rows", "steps"):
        if getattr(chosen, name, 1) < 1:
            raise ValueError(f"--{name} must be 1 or more, got {getattr(chosen, name)}.")
    for name in ("picture", "trace"):
        folder = Path(getattr(chosen, name, None) or "").parent
        if not folder.is_dir():
            raise ValueError(f"--{name}: there is no folder {folder}.")


def _caps(chosen: argparse.Namespace) -> dict[str, Any]:
    return {cap: getattr(chosen, cap) for cap in CAPS if getattr(chosen, cap) is not None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
