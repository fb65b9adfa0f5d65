"""python -m fddp: look at a step before it runs, and while it does."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from fddp.runtime import fddp_version
from fddp.runtime.commands import add_flight, add_run
from fddp.step import Options, Shared

TARGET = "a100:N, h100:N, h200:N, or h100:2x8 for two hosts of eight"
MODEL = "module:function; or mlp or transformer, which are part of fddp (default %(default)s)"
PROTOCOL = (
    "module:function names a function of a module in the current folder or of an installed "
    "package. It takes no arguments and returns (loss_fn, params, batch), as for fddp.train_step, "
    "or (loss_fn, params, batch, model_state). The command draws the rows of all replicas from "
    "the batch, and uses the optimizer optax.adamw(1e-3)."
)


def main(argv: Sequence[str]) -> int:
    """Runs a subcommand; returns 0, 1 if an audit finds problems or bits differ, 2 on an error."""
    args = _parser().parse_args(argv)
    try:
        _check(args)
        if hasattr(args, "run"):
            return args.run(args)
        from fddp.analysis import observers  # only now: --help and errors need none of it

        observers.prepare(args)
        return getattr(observers, f"run_{args.name}")(args)
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RuntimeError, ModuleNotFoundError, OSError) as error:
        print(f"python -m fddp: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fddp",
        description="Look at a data-parallel step, before it runs and while it does.",
    )
    parser.add_argument("--version", action="version", version=f"fddp {fddp_version()}")
    commands = parser.add_subparsers(metavar="command", dest="name", required=True)
    add_run(commands)
    for name, (words, add) in OBSERVERS.items():
        description = f"{words[0].upper()}{words[1:]}."
        epilog = PROTOCOL if add else None
        command = commands.add_parser(name, help=words, description=description, epilog=epilog)
        if add:
            _add_model(command)
            add(command)
    add_flight(commands)
    return parser


### Options of each command


def _add_caps(parser: argparse.ArgumentParser) -> None:
    for cap in ("bucket_cap_mb", "first_bucket_mb", "last_bucket_mb"):
        text = f"as of fddp.train_step (default {getattr(Options, cap)})"
        parser.add_argument(f"--{cap.replace('_', '-')}", type=float, metavar="MIB", help=text)


def _audit(parser: argparse.ArgumentParser) -> None:
    _add_caps(parser)
    parser.add_argument("--target", default="h100:8", help=f"{TARGET} (default %(default)s)")
    parser.add_argument("--picture", metavar="FILE", help="draw the estimated schedule")
    parser.add_argument(
        "--shard",
        choices=get_args(Shared),
        help="share the state, and compare the memory of all layouts",
    )


def _measure(parser: argparse.ArgumentParser) -> None:
    _add_caps(parser)
    parser.add_argument("--steps", type=int, default=10, help="how many steps (default 10)")
    parser.add_argument("--trace", metavar="FILE", help="write the steps for ui.perfetto.dev")
    parser.add_argument("--picture", metavar="FILE", help="draw a typical step")


def _tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help=f"{TARGET} (default: these hosts)")
    parser.add_argument(
        "--caps", type=float, nargs="+", metavar="MIB", help="the bucket caps to compare"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of a measurement (default 4)")


def _reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=50, help="how many steps (default 50)")
    parser.add_argument(
        "--replicas",
        type=_counts,
        default=[1, 2, 4],
        metavar="N,N,…",
        help="numbers of replicas (default 1,2,4)",
    )


OBSERVERS = {
    "plan": ("print the assignment of gradients to buckets", _add_caps),
    "audit": (
        "compile a step for GPUs that need not be installed, and report its overlap",
        _audit,
    ),
    "measure": ("run a step and measure how it spends its time; also under mpirun", _measure),
    "tune": (
        "find the best bucket cap and schedule: on these hosts, under mpirun, one replica each; "
        "or for GPUs that need not be installed",
        _tune,
    ),
    "reproduce": ("train on 1, 2 and 4 replicas and compare the bits", _reproduce),
    "doctor": ("report what works in this installation, and remedies for problems", None),
}


### What commands have in common


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="mlp", help=MODEL)
    words = "rows of a replica (default: as many as the batch has)"
    parser.add_argument("--rows", type=int, help=words)


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for invalid options before the work starts; a command may lack some."""
    for name in ("rows", "steps"):
        count = getattr(args, name, None)
        if count is not None and count < 1:
            raise ValueError(f"--{name} must be 1 or more, got {count}.")
    for name in ("picture", "trace"):
        folder = Path(getattr(args, name, None) or "").parent
        if not folder.is_dir():
            raise ValueError(f"--{name}: there is no folder {folder}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
