"""Does fddp keep its promises on a GPU: the training of plain JAX, at no cost, over NCCL, from
every launcher?

    python bench/gpu.py [--quick] [--parts same cost …]

One command for a machine with one GPU or several, within eight minutes. Each part runs in a process
of its own and has a share of the time that is left, so that none hides another: a failed or late
part is reported as such. Without a GPU the same command rehearses all parts on CPUs, over Gloo and
with tiny models, and saves nothing.

  same       a step against plain JAX: losses and parameters after some steps, and whether
             bits are equal
  ranks      losses over NCCL and one replica's on the joined rows; two ranks share the GPU where
             there is one
  cost       a step's time against a step by hand
  memory     memory of each rank with shard=None, "optimizer" and "state"
  launchers  the GPU of each rank under fddp.launch, `python -m fddp run`, torchrun, mpirun, srun
  ahead      the program of `ranks`, and the memory of eight replicas, compiled ahead of time

It needs jax[cuda], flax, optax, numpy and jaxtyping, and runs from a checkout. Part `ahead` uses
XLA's compiler alone, the package jax-cuda13-pjrt, which jax[cuda13] brings. The exit status is 1
where a part has failed or is wrong.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.on_gpu import ahead, cost, launchers, ranks, same
from bench.on_gpu.machine import REHEARSAL, Machine, look, one_gpu, variables
from bench.on_gpu.words import rows, unsound
from bench.record import question, save
from fddp.wording import table

SECONDS = 465  # of eight minutes, with some left to start and to end
LOOK_S = 90


class Part(NamedTuple):
    """One question."""

    measures: Callable[[Machine], Mapping[str, Callable[[], dict[str, Any]]]]
    """Makes the measuring functions, by the names of their quantities."""
    tell: Callable[[dict[str, Any]], str]
    """Puts figures into words."""
    isolated: bool
    """True if it is one process, which then sees one GPU."""
    weight: float
    """Its share of the time."""
    env: Mapping[str, str] = {}


AHEAD = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
PARTS = {
    "same": Part(same.measures, same.tell, True, 3),
    "ranks": Part(ranks.measures_of_training, ranks.tell_training, False, 4),
    "cost": Part(cost.measures, cost.tell, True, 2.5),
    "memory": Part(ranks.measures_of_memory, ranks.tell_memory, False, 4),
    "launchers": Part(launchers.measures, launchers.tell, False, 2),
    "ahead": Part(ahead.measures, ahead.tell, True, 1, AHEAD),
}


def main() -> None:
    parser = question(__doc__, "tiny models, few rounds, the part `cost` if none is given")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="these alone; nothing is saved")
    parser.add_argument("--out", help="write the figures into this file as well")
    # A part: its name, the machine, a file.
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return answer(args.part[0], json.loads(args.part[1]), Path(args.part[2]))
    parts = args.parts or (["cost"] if args.quick else list(PARTS))
    end = time.monotonic() + SECONDS
    results = dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="fddp-gpu-") as folder:
        env = variables(os.environ, folder)
        machine = find(args.quick, env, Path(folder))
        print(head(machine), flush=True)
        for number, name in enumerate(parts):
            weights = [PARTS[part_name].weight for part_name in parts[number:]]
            seconds = (end - time.monotonic()) * weights[0] / sum(weights)
            results[name] = run(name, machine, env, Path(folder) / f"{name}.jsonl", seconds)
            print("\n".join(table(rows(name, results[name], PARTS[name].tell))), flush=True)
    report = {"machine": machine._asdict(), **results}
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    if machine.on_gpu and not machine.quick and parts == list(PARTS):
        os.environ |= env  # the record reads JAX's devices
        print(save("gpu", report))
    sys.exit(1 if unsound(results) else 0)


def head(machine: Machine) -> str:
    """The machine in words."""
    if not machine.on_gpu:
        return (
            "No GPU was found: this is a rehearsal on CPUs. Its times say nothing of GPUs, and "
            "nothing is saved."
        )
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB for JAX"
    return f"{machine.gpus} × {machine.kind}, {memory}, NCCL {machine.nccl or 'of unknown version'}"


### Parts, each a process


def find(quick: bool, env: Mapping[str, str], folder: Path) -> Machine:
    """Looks for GPUs in a process of its own, for this one must not hold their memory."""
    outcome = _run_process("look", json.dumps(quick), env, folder / "look.jsonl", LOOK_S)
    if "failed" in outcome:
        raise SystemExit(f"JAX does not start here: {outcome['failed']}")
    return Machine(**outcome["figures"]["machine"])


def run(
    name: str, machine: Machine, env: Mapping[str, str], path: Path, seconds: float
) -> dict[str, Any]:
    """Runs one part in a process; returns its figures by name, and its failure, if any, under
    "failed"."""
    part = PARTS[name]
    gpu_variables = REHEARSAL if not machine.on_gpu else one_gpu(env) if part.isolated else {}
    env = {**env, **gpu_variables, **part.env}
    begin = time.monotonic()
    outcome = _run_process(name, json.dumps(machine), env, path, seconds)
    return outcome | {"seconds": round(time.monotonic() - begin, 1)}


def answer(name: str, machine_values: Any, path: Path) -> None:
    """Measures all quantities of a part in this process, and writes each result down at once."""
    measures = (
        {"machine": lambda: look(machine_values)._asdict()}
        if name == "look"
        else PARTS[name].measures(Machine(*machine_values))
    )
    with path.open("a") as file:
        for what, measure in measures.items():
            try:
                figures = measure()
            except Exception as error:  # of XLA, NCCL or a launcher: the next part still runs
                figures = {"failed": f"{type(error).__name__}: {error}"[-1500:]}
            file.write(json.dumps({what: figures}) + "\n")
            file.flush()


def _run_process(
    name: str, machine_json: str, env: Mapping[str, str], path: Path, seconds: float
) -> dict[str, Any]:
    """Runs a part to its end, or ends it."""
    command = [sys.executable, __file__, "--part", name, machine_json, str(path)]
    with tempfile.TemporaryFile() as log:
        pipes: Any = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, env=dict(env), cwd=ROOT, **pipes)
        try:
            code = process.wait(timeout=max(seconds, 1))
            failed = f"it ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failed = f"it had not ended after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # ranks that have left its group end with it
                process.wait()
        log.seek(0)
        text = log.read().decode(errors="replace")[-1500:]
    lines = path.read_text().splitlines() if path.exists() else []
    figures = {what: figures_of for line in lines for what, figures_of in json.loads(line).items()}
    return {"figures": figures, **({"failed": f"{failed}: {text}"} if failed else {})}


if __name__ == "__main__":
    main()
