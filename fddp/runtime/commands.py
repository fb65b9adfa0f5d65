"""The commands of `python -m fddp` that supervise a job, or look at one that has ended."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from fddp.runtime.mpi_vendors import loaded
from fddp.runtime.supervisor import Job, launcher, supervise
from fddp.watching import read_flights, told

### run: a job that is started again when a rank fails


def add_run(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run", help="start the ranks of a job, and start them again when one fails"
    )
    parser.add_argument("-n", type=int, required=True, dest="ranks", help="how many processes")
    parser.add_argument(
        "--hosts", default="", help="host1,host2,…: where, equally many on each (default: here)"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, help="how often to start again (default 0)"
    )
    parser.add_argument(
        "--min",
        type=int,
        default=1,
        dest="least",
        help="not with fewer ranks than this (default 1)",
    )
    text = "mpiexec, or processes of our own that meet over Gloo or NCCL (default: what is there)"
    parser.add_argument("--by", choices=("mpiexec", "processes"), help=text)
    parser.add_argument(
        "-m", action="store_true", dest="module", help="what is run is a module, as of python -m"
    )
    text = (
        "a script of Python's and its arguments, train.py say; or after --: any command, "
        "python train.py say"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=text)
    parser.set_defaults(run=run_run)


def run_run(args: argparse.Namespace) -> int:
    program = None
    if args.by == "mpiexec" or (not args.by and (args.hosts or find_spec("mpi4jax"))):
        program = launcher(loaded()[0])
    if args.by == "mpiexec" and program is None:
        raise ValueError(
            "--by mpiexec: there is none here; install the extra 'mpi', or take --by processes."
        )
    hosts = [host for host in args.hosts.split(",") if host]
    command = read_command(args.command, module=args.module)
    return supervise(Job(command, args.ranks, hosts, args.restarts, args.least, program))


def read_command(words: Sequence[str], *, module: bool) -> list[str]:
    """Returns the command of each rank; this Python starts scripts and modules, unbuffered."""
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ValueError(
            "run: what? Give a script, train.py say, or after -- a command, python train.py say."
        )
    python = [sys.executable, "-u"]
    if module:
        return [*python, "-m", *words]
    if words[0].endswith(".py"):
        return [*python, *words]
    return [*words]


### flight: what the ranks of a job that ended sent last


def add_flight(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "flight", help="say where the ranks of a job that ended first differ"
    )
    parser.add_argument(
        "records", nargs="+", help="the folder that the job named, or its files rank_*.json"
    )
    parser.set_defaults(run=run_flight)


def run_flight(args: argparse.Namespace) -> int:
    print(told(read_flights(args.records)))
    return 0
