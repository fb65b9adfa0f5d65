"""Is every broken rank named, in time, and does everything end?

    python bench/faults.py [--count 200] [--clean 2000] [--seed 0] [--quick]

Draws faults at random (kind, rank, place, backend, schedule), breaks one rank of three that train a
tiny network with a stall of one second, and records the ranks' output and the time until all are
gone. Then trains without a fault, with random pauses that are shorter than a stall, and counts the
warnings.
"""

import argparse
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.jobs import start
from bench.record import question, save

SIZE = 3
STALL_S = 1.0
LIMIT_S = 90.0
STEPS = 8  # before the fault, at least


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold() -> None:
    ctypes.PyDLL(None).sleep(1000)  # a call that keeps Python's interpreter


def _raise() -> None:
    raise ArithmeticError("broken on purpose")


def _leave() -> None:
    raise SystemExit(3)


# The causes of a broken rank, and the words that name it.
FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "died"),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "died"),
    "os._exit": (lambda: os._exit(0), "died"),
    "SIGSTOP": (_stop, "is stopped|does not run Python|has not been heard of"),
    "held GIL": (_hold, "does not run Python"),
    "raise": (_raise, "of 3 failed|failed"),
    "SystemExit": (_leave, "left by|failed"),
}
PLACES = ("between", "step")
BACKENDS = ("mpi", "gloo")
SCHEDULES = ("overlap", "after", "eager")


@dataclass(frozen=True)
class Case:
    """One fault."""

    fault: str
    rank: int
    place: str
    backend: str
    schedule: str
    step: int


@dataclass
class Result:
    """The outcome of a case; seconds from the fault on."""

    told_s: float | None
    """Seconds until a rank was named."""
    named: list[int]
    """The ranks named in any line."""
    gone_s: float | None
    """Seconds until the last process was gone; None: some were still running at the limit."""
    codes: list[int]
    foreign: int
    """Lines other than fddp's and the traceback of the failing rank."""
    left: list[str]
    """New files in /dev/shm."""
    text: str = ""


def main() -> None:
    parser = question(__doc__, "2 faults and 20 steps")
    parser.add_argument("--count", type=int, default=200, help="how many faults (default 200)")
    parser.add_argument("--clean", type=int, default=2000, help="steps without a fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", nargs="+", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(*args.rank)
        return
    draw = random.Random(args.seed)
    count, clean = (2, 20) if args.quick else (args.count, args.clean)
    cases = [drawn(draw) for _ in range(count)]
    results = []
    for number, case in enumerate(cases):
        result = tried(case)
        results.append((case, result))
        print(f"{number + 1:4} {line(case, result)}", flush=True)
        if not right(case, result):
            print(result.text)
    print(summed_up(results))
    warnings = {backend: calm(backend, clean) for backend in BACKENDS}
    print(f"{clean} steps with pauses below a stall: {warnings} warnings")
    if not args.quick:
        entries = [asdict(case) | asdict(replace(result, text="")) for case, result in results]
        calm_steps = {"steps": clean, **warnings}
        settings = {"stall_s": STALL_S, "ranks": SIZE, "clean": calm_steps}
        print(save("faults", settings | {"cases": entries}))


def drawn(draw: random.Random) -> Case:
    fault, place = draw.choice(list(FAULTS)), draw.choice(PLACES)
    rank, step = draw.randrange(SIZE), STEPS + draw.randrange(20)
    return Case(fault, rank, place, draw.choice(BACKENDS), draw.choice(SCHEDULES), step)


def right(case: Case, result: Result) -> bool:
    """True if only the broken rank was named, in some line, and all have ended."""
    # mpiexec reports a single code of its ranks, that of a rank that breaks by os._exit(0).
    other_codes = [
        code
        for rank, code in enumerate(result.codes)
        if len(result.codes) == 1 or rank != case.rank
    ]
    return result.named == [case.rank] and result.gone_s is not None and 0 not in other_codes


def line(case: Case, result: Result) -> str:
    seconds = (result.told_s, result.gone_s)
    times = " ".join("  none" if x is None else f"{x:6.1f}" for x in seconds)
    what = f"{case.fault:<10} rank {case.rank} {case.place:<8} {case.backend:<5} {case.schedule:<7}"
    counts = f"named {result.named}; {result.foreign} other lines; left {len(result.left)}"
    return f"{what} told, gone {times} s; {counts}"


def summed_up(results: list[tuple[Case, Result]]) -> str:
    good = sum(right(case, result) for case, result in results)
    hangs = sum(result.gone_s is None for _, result in results)
    lines = [f"{good} of {len(results)} named the right rank, and only that; {hangs} hangs"]
    for fault in FAULTS:
        chosen = [result for case, result in results if case.fault == fault]
        if chosen:
            told_s, gone_s = (
                f"{np.median(x):.1f} s (at most {max(x):.1f})" if x else "never"
                for x in (
                    [result.told_s for result in chosen if result.told_s is not None],
                    [result.gone_s for result in chosen if result.gone_s is not None],
                )
            )
            most = max(result.foreign for result in chosen)
            lines.append(
                f"  {fault:<10} {len(chosen):3} times: named after {told_s}, gone after {gone_s}; "
                f"other lines at most {most}"
            )
    left = Counter(name for _, result in results for name in result.left)
    lines.append(f"  left behind: {dict(left) or 'nothing'}")
    return "\n".join(lines)


### One fault


def tried(case: Case) -> Result:
    """Breaks one rank of a job, and observes it."""
    shared = set(map(str, Path("/dev/shm").iterdir()))
    with tempfile.TemporaryDirectory() as folder:
        words = [str(x) for x in asdict(case).values()]
        env = {"FDDP_FLIGHT_DIR": f"{folder}/flight", "FDDP_GRACE_S": "1"}
        jobs = job_of(case.backend, folder, words, env, start_new_session=True)
        timed_lines: list[tuple[float, str]] = []
        readers = [
            threading.Thread(target=_read, args=(job.stdout, timed_lines), daemon=True)
            for job in jobs
        ]
        for reader in readers:
            reader.start()
        until = time.monotonic() + LIMIT_S
        # A process that was just started does not have its environment yet.
        while (
            any(job.poll() is None for job in jobs) or processes_of(folder)
        ) and time.monotonic() < until:
            time.sleep(0.05)
        all_ended = time.monotonic()
        going = processes_of(folder)
        for process in going:
            os.kill(process, signal.SIGKILL)
        for reader in readers:
            reader.join(5)
        codes = [job.wait() for job in jobs]
        broken = Path(folder, "broken")
        at = float(broken.read_text()) if broken.exists() else until
    words = FAULTS[case.fault][1]
    fddp_lines = [(when, text) for when, text in timed_lines if "fddp: " in text]
    named = [
        (when, int(k))
        for when, text in fddp_lines
        for k in re.findall(rf"rank (\d+) (?:{words})", text)
    ]
    raised = case.fault == "raise" or (case.fault, case.place) == ("SystemExit", "step")
    foreign = [
        text
        for _, text in timed_lines
        if "fddp: " not in text and "[Gloo]" not in text and text.strip()
    ]
    return Result(
        told_s=round(min(when for when, _ in named) - at, 2) if named else None,
        named=sorted({rank for _, rank in named}),
        gone_s=None if going else round(all_ended - at, 2),
        codes=codes,
        foreign=0 if raised else len(foreign),
        left=sorted(set(map(str, Path("/dev/shm").iterdir())) - shared),
        text="".join(f"{when - at:8.2f} {text}" for when, text in timed_lines),
    )


def job_of(
    backend: str, folder: str, words: list[str], env: dict[str, str], **more: Any
) -> list[subprocess.Popen]:
    """Starts the ranks of a case; `processes_of` finds them by the folder."""
    env |= {"JAX_PLATFORMS": "cpu", "BENCH": folder}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, __file__, "--rank", folder, *words]
    return start(backend, SIZE, command, env, **pipes, **more)


def _read(stream: Any, timed_lines: list[tuple[float, str]]) -> None:
    for text in stream:
        timed_lines.append((time.monotonic(), text))


def processes_of(folder: str) -> list[int]:
    """All processes that were started for a case, watchers included: they have its folder in their
    environment."""
    numbers = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                of_job = f"BENCH={folder}".encode() in (process / "environ").read_bytes().split(
                    b"\0"
                )
                zombie = (process / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
            except OSError:
                continue
            numbers += [int(process.name)] if of_job and not zombie else []
    return numbers


def calm(backend: str, steps: int) -> int:
    """The number of warnings in a job without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["nothing", "0", "between", backend, "overlap", str(steps)]
        jobs = job_of(backend, folder, words, {})
        output = "".join(job.communicate(timeout=3600)[0] for job in jobs)
    if any(job.returncode for job in jobs):
        raise RuntimeError(f"{backend}: a job without a fault ended badly:\n{output}")
    return len(re.findall("^fddp: rank", output, re.MULTILINE))


### One rank


def train(
    folder: str, fault: str, rank: str, place: str, backend: str, schedule: Any, step: str
) -> None:
    """Trains until it breaks, or the others do."""
    import jax
    import jax.numpy as jnp
    import optax

    import fddp

    group = fddp.init(backend, stall_s=STALL_S)
    faulty = group.rank == int(rank)

    def strike() -> None:
        Path(folder, "broken").write_text(str(time.monotonic()))
        FAULTS[fault][0]()

    def inside() -> np.ndarray:
        """Runs inside each step's program."""
        if faulty and place == "step" and train_step.steps == int(step):
            strike()
        return np.zeros((), np.float32)

    def loss(p: Any, x: Any) -> Any:
        zero = jax.pure_callback(inside, jax.ShapeDtypeStruct((), jnp.float32))
        return jnp.mean((x @ p["a"] @ p["b"]) ** 2) + zero

    train_step = fddp.train_step(
        loss, optax.sgd(0.1), group=group, schedule=schedule, bucket_cap_mb=0
    )
    state = train_step.init({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 1), np.float32)})
    pauses = random.Random(group.rank)
    for number in range(int(step) if fault == "nothing" else 1_000_000):
        if faulty and place == "between" and number == int(step) and fault != "nothing":
            strike()
        if fault == "nothing" and pauses.random() < 0.01:
            time.sleep(pauses.uniform(0, 0.9 * STALL_S))
        state, info = train_step(state, np.ones((4, 4), np.float32))
        float(info.loss)


if __name__ == "__main__":
    main()
