"""python -m fddp: starts jobs, reports on failed ones, and examines this installation."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from fddp.runtime import fddp_version
from fddp.runtime.commands import add_flight, add_run


def main(argv: Sequence[str]) -> int:
    """Runs a subcommand; returns 0, the exit code of a failed job, or 2 on an error."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RuntimeError, ModuleNotFoundError, OSError) as error:
        print(f"python -m fddp: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fddp",
        description="Start a job, read the records of a failed one, or examine this installation.",
    )
    parser.add_argument("--version", action="version", version=f"fddp {fddp_version()}")
    commands = parser.add_subparsers(metavar="command", required=True)
    add_run(commands)
    add_flight(commands)
    doctor = commands.add_parser(
        "doctor", help="report what works in this installation, and remedies for problems"
    )
    doctor.set_defaults(run=_run_doctor)
    return parser


def _run_doctor(args: argparse.Namespace) -> int:
    from fddp.analysis.doctor import examine  # only now: --help and errors need none of it

    del args
    for finding in examine():
        print(f"{finding.what:<22}  {finding.found}")
        if finding.advice:
            print(f"{'':<22}  → {finding.advice}")
    return 0


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if a shell has closed it
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    sys.exit(main(sys.argv[1:]))
