r"""Fewer bits on a wire: how much time do they save, and does each reported byte cross it? fddp and
PyTorch DDP.

    sudo .venv/bin/python bench/bits_on_wire.py times [--problems mlp640 gpt] \
        [--rates 1gbit 100mbit] [--torch PYTHON]
    sudo .venv/bin/python bench/bits_on_wire.py bytes

Two hosts, one core each (bench/two_hosts.py). "times" lets all ways of a problem take turns, as
bench/overlap.py does; the adaptive hook has the bits that `bench/fitted_bits.py`
chooses before the first turn that counts. "bytes" compares `info.sent` with the kernel's counter of
the wire, over staged steps, and looks at no clock.

  exposed    the share of a step in which something was sent and nothing computed, median over
             steps, on the slower host
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.fitted_bits import fit_bits, refit_bits
from bench.hierarchical import SENT
from bench.jobs import ending
from bench.overlap import CAPS_MB, in_turns, listening
from bench.overlap_worker import OPTIMIZER, by_itself, obey, with_fddp
from bench.problems import Problem, problem
from bench.record import save, saved
from bench.two_hosts import BACKENDS, ask, start_gloo, start_mpi, two_hosts
from fddp import hooks

TURN = 4  # steps; the first, whose caches another way has filled, does not count
# Steps before the first that counts: they compile; eager's try its orders of messages; adaptive's
# choose bits.
WARM_UP = {"staged": 6, "eager": 25, "adaptive": 40}
FIT = 2
REFITS = (8, 14)
TIMED = ("32 bits", "bf16")
COUNTED = 20
HOOKS = {
    "32 bits": None,
    "bf16": hooks.bf16(),
    "quantize(bits=8)": hooks.quantize(),
    "quantize(bits=4)": hooks.quantize(bits=4),
    "sign": hooks.sign(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["times", "bytes"])
    parser.add_argument(
        "--problems", nargs="+", default=["mlp640", "gpt"], help="of bench/problems.py"
    )
    parser.add_argument(
        "--rates", nargs="+", default=["1gbit", "100mbit"], help="of the wire, as tc writes them"
    )
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument(
        "--torch", default=None, help="python of an environment with torch 2.13 (CPU)"
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of each way")
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds, or 3 steps; nothing is saved"
    )
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)  # this is one of the hosts
    args = parser.parse_args()
    if args.rank:
        return (take_turns if args.what == "times" else count)(*args.rank)
    if args.what == "bytes":
        return compare_bytes(
            args.problems, args.backends, 3 if args.quick else COUNTED, keep=not args.quick
        )
    rounds = 2 if args.quick else args.rounds
    for rate in args.rates:
        for name in args.problems:
            result = measure(name, rate, args.backends, rounds, args.torch)
            print(f"\n{name}, {rate}\n{table(result)}", flush=True)
            if not args.quick:
                print(save(f"bits_on_wire_{name}_{rate}", result))
    return None


### Times


def measure(
    name: str, rate: str, backends: list[str], rounds: int, torch: str | None
) -> dict[str, Any]:
    """Starts all ways of a problem on two hosts and lets them take turns."""
    with two_hosts(rate), listening() as (control, accept):
        jobs = []
        lines = 0
        for backend in backends:
            words = [sys.executable, __file__, "times", "--rank", backend, control, name]
            start = start_mpi if backend == "mpi" else start_gloo
            jobs += start(words, {"PYTHONPATH": str(ROOT)})
            lines += 2
        if torch:
            jobs += start_gloo(
                [torch, str(ROOT / "bench" / "torch_worker.py"), control, name, "bf16"], {}
            )
            lines += 2
        with ending(jobs):
            seconds, spans = in_turns(accept(lines), rounds, steps=TURN, warm_up=warm_up)
    result = dict[str, Any]()
    for way, durations in seconds.items():
        shares = [
            max(line.exposed / line.seconds for line in ranks)
            for ranks in spans[way]
            if ranks[0].spans
        ]
        result[way] = {
            "step_ms": [round(1e3 * q, 1) for q in np.percentile(durations, (25, 50, 75))],
            "exposed": round(float(np.median(shares)), 4) if shares else None,
        }
    return result


def warm_up(way: str) -> int:
    return max((steps for word, steps in WARM_UP.items() if word in way), default=WARM_UP["staged"])


def table(result: dict[str, Any]) -> str:
    rows = list[str]()
    for way, entry in result.items():
        low, middle, high = entry["step_ms"]
        exposed = "" if entry["exposed"] is None else f"   exposed {entry['exposed']:6.1%}"
        rows.append(f"{way:40} {low:8.1f} {middle:8.1f} {high:8.1f} ms{exposed}")
    return "\n".join(rows)


def take_turns(backend: str, control: str, name: str) -> None:
    """One host's part."""
    group = fddp.init(backend)
    task = problem(name, seed=group.rank)
    ways = {}
    for schedule in ("staged", "eager"):
        for bits in TIMED:
            options = {"hook": HOOKS[bits]}
            ways[f"fddp {schedule}, {bits} ({backend})"] = with_fddp(
                task, group, schedule, CAPS_MB[name], **options
            )
        ways[f"fddp {schedule}, adaptive ({backend})"] = fitted(
            task, group, schedule, CAPS_MB[name]
        )
    ways[f"alone, staged ({backend})"] = with_fddp(
        task, by_itself(backend), "staged", CAPS_MB[name]
    )
    obey(control, backend, group, ways)


def fitted(task: Problem, group: fddp.Group, schedule: Any, cap_mb: float) -> Any:
    """A step whose bits are chosen, and chosen again, in its first steps."""
    caps = dict.fromkeys(("bucket_cap_mb", "first_bucket_mb", "last_bucket_mb"), cap_mb)
    options = {
        "group": group,
        "has_aux": True,
        "schedule": schedule,
        "hook": hooks.adaptive((32,)),
        **caps,
    }
    step = fddp.train_step(task.loss_fn, OPTIMIZER, **options)
    state = step.init(task.params, model_state=task.model_state)
    number = 0

    def run() -> Any:
        nonlocal step, state, number
        if number == FIT:
            fitted = fit_bits(step, state, task.batch)
            step = step.with_options(hook=hooks.adaptive(fitted.bits))
            group.print(fitted)
        if number in REFITS:
            step = refit_bits(step)
            group.print(f"after {number} steps: {step.options.hook}")
        number += 1
        state, info = step(state, task.batch)
        return info.loss

    return run, lambda: step.timeline(), lambda: state


### Bytes


def compare_bytes(problems: list[str], backends: list[str], steps: int, *, keep: bool) -> None:
    """Prints reported bytes next to those on the wire; the file keeps the other problems."""
    results = saved("bits_told").get("bytes_told_and_sent", {})
    for name in problems:
        for backend in backends:
            counts = ask(backend, "1gbit", __file__, "bytes", "--rank", backend, name, steps)
            results[f"{name}, {backend}"] = counts
            for hook, (reported, on_wire) in counts.items():
                print(
                    f"{name:7} {backend:5} {hook:17} {reported:>13,} told {on_wire:>13,} sent: "
                    f"{on_wire / reported:.4f}",
                    flush=True,
                )
            if keep:
                print(save("bits_told", {"steps": steps, "bytes_told_and_sent": results}))


def count(backend: str, name: str, steps: str, path: str) -> None:
    """One host's part: reported and sent bytes of rank 0 for each hook."""
    group = fddp.init(backend)
    task = problem(name, seed=group.rank)
    counts = dict[str, tuple[int, int]]()
    for title, hook in HOOKS.items():
        step = fddp.train_step(
            task.loss_fn,
            OPTIMIZER,
            group=group,
            has_aux=True,
            schedule="staged",
            bucket_cap_mb=CAPS_MB[name],
            hook=hook,
        )
        state = step.init(task.params, model_state=task.model_state)
        state, info = step(state, task.batch)
        group.barrier()
        before = int(SENT.read_text())
        reported = 0
        for _ in range(int(steps)):
            state, info = jax.block_until_ready(step(state, task.batch))
            reported += int(np.sum(np.asarray(info.sent), dtype=np.int64))
        group.barrier()
        counts[title] = (reported, int(SENT.read_text()) - before)
    if group.rank == 0:
        Path(path).write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
