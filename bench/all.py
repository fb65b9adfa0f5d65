"""Does every benchmark run? Each in its short version, for a minute at most.

    sudo .venv/bin/python bench/all.py --quick [--only NAME ...]

Prints the seconds of each, and the end of the output of those that fail or take longer. Benchmarks
of two hosts need root and iproute2. Without `--quick` each takes its own time, and saves.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH.parent))
from bench.record import question

LIMIT_S = 60.0


def main() -> None:
    parser = question(__doc__, f"each for {LIMIT_S:.0f} s at most")
    parser.add_argument("--only", nargs="+", choices=questions(), default=questions())
    args = parser.parse_args()
    failed = [name for name in args.only if not runs(name, args.quick)]
    sys.exit(f"not well: {', '.join(failed)}" if failed else 0)


def questions() -> list[str]:
    """The scripts that ask something."""
    asking = [x.stem for x in sorted(BENCH.glob("*.py")) if "parse_args()" in x.read_text()]
    return [name for name in asking if name not in ("two_hosts", "all")]


def runs(name: str, quick: bool) -> bool:
    """Runs one, and returns True if it ends well in time."""
    command = [sys.executable, str(BENCH / f"{name}.py"), *["--quick"] * quick]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, cwd=BENCH.parent, stdout=log, stderr=log) as process:
            try:
                code = process.wait(5 * LIMIT_S if quick else None)
            except subprocess.TimeoutExpired:
                process.terminate()
                code = process.wait()
        seconds = time.monotonic() - begin
        well = code == 0 and (seconds <= LIMIT_S or not quick)
        print(
            f"{name:16} {seconds:6.1f} s{'' if well else f', NOT WELL: exit code {code}'}",
            flush=True,
        )
        if not well:
            log.seek(0)
            print(log.read()[-2000:], flush=True)
    return well


if __name__ == "__main__":
    main()
