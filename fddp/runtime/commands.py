"""The commands of `python -m fddp` for running jobs and for ended ones."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fddp.runtime.mpi_vendors import launchers, loaded
from fddp.runtime.replacing import supervise_ranks
from fddp.runtime.supervisor import Job, supervise
from fddp.runtime.watching import flight_text, read_flights

MOST_RESTARTS = 1000

### run: a job that is started again when a rank fails


def add_run(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run", help="start the ranks of a job, and restart them when a rank fails"
    )
    parser.add_argument("-n", type=int, required=True, dest="ranks", help="how many processes")
    text = "host1,host2,…: hosts, with the same number of ranks each (default: this host)"
    parser.add_argument("--hosts", default="", help=text)
    text = "number of restarts (default 0; with --elastic 1000, of single ranks)"
    parser.add_argument("--restarts", type=int, help=text)
    text = "the script calls fddp.init(elastic=True): a rank that fails starts again by itself"
    parser.add_argument("--elastic", action="store_true", help=text)
    text = "minimum number of ranks (default 1)"
    parser.add_argument("--min", type=int, default=1, dest="least", help=text)
    text = "mpiexec, or processes over Gloo or NCCL (default: mpiexec, if available)"
    parser.add_argument("--by", choices=("mpiexec", "processes"), help=text)
    parser.add_argument(
        "-m", action="store_true", dest="module", help="run a module, as python -m does"
    )
    text = (
        "a Python script and its arguments, such as train.py; or after --: any command, such as "
        "python train.py"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=text)
    parser.set_defaults(run=run_run)


def run_run(args: argparse.Namespace) -> int:
    hosts = [host for host in args.hosts.split(",") if host]
    command = read_command(args.command, module=args.module)
    if args.elastic and args.by == "mpiexec":
        raise ValueError(
            "--elastic starts processes over Gloo or NCCL: an MPI job ends with its first dead "
            "rank. Leave out --by mpiexec, or use --restarts, which restarts the whole job."
        )
    over_mpi = args.by == "mpiexec" or (not args.by and bool(hosts or find_spec("mpi4jax")))
    if args.elastic:
        over_mpi = bool(hosts)  # mpiexec starts each rank there
    program = next(launchers(loaded()[0]), None) if over_mpi else None
    if args.by == "mpiexec" and program is None:
        raise ValueError(
            "--by mpiexec: mpiexec is not installed here: pip install mpich, or use --by processes."
        )
    if args.elastic:
        restarts = MOST_RESTARTS if args.restarts is None else args.restarts
        return supervise_ranks(Job(command, args.ranks, hosts, restarts, args.least, program))
    return supervise(Job(command, args.ranks, hosts, args.restarts or 0, args.least, program))


def read_command(words: Sequence[str], *, module: bool) -> list[str]:
    """Returns the command of each rank; this Python starts scripts and modules, unbuffered."""
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ValueError(
            "run: give a script, such as train.py, or after -- a command, such as python train.py."
        )
    if Path(words[0]).is_dir() and not module:
        raise ValueError(f"run: {words[0]!r} is a folder: give a script in it, such as train.py.")
    python = [sys.executable, "-u"]
    if module:
        return [*python, "-m", *words]
    if words[0].endswith(".py"):
        return [*python, *words]
    return [*words]


### flight: what the ranks of a job that ended sent last


def add_flight(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "flight", help="report the first difference between the ranks of a job that ended"
    )
    parser.add_argument(
        "records", nargs="+", help="the folder that the job printed, or its files rank_*.json"
    )
    parser.set_defaults(run=run_flight)


def run_flight(args: argparse.Namespace) -> int:
    print(flight_text(read_flights(args.records)))
    return 0
