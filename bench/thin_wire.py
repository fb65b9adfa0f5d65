"""Islands on a thin wire between two hosts: how much do they save, and how much test loss do they
cost?

    sudo .venv/bin/python bench/thin_wire.py [--steps 64] [--backends mpi] [--quick] # bytes
    python bench/thin_wire.py --losses [--seeds 5] [--first 0] [--steps 2000]        # losses

Four ranks on two emulated hosts, 1 Gbit/s inside of each and 100 Mbit/s between them; the bytes
between the hosts are the kernel's own counters, headers, watchers and all. An island is a host. The
losses need no wire: four replicas on devices of one CPU train the GPT of bench/local_steps.py, on
the same rows with every method.

Source: Douillard et al., "DiLoCo" (2023); PyTorch's `post_localSGD` with subgroups.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.local_steps import NESTEROV, REPLICAS, byte_gpt, train
from bench.record import save, saved
from bench.two_hosts import BACKENDS, TWO, ask, shape

BETWEEN = "100mbit"
INSIDE = "1gbit"
EVERY = 32
# The arguments of `fddp.local_steps`, by name; None: DDP.
METHODS: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    "local SGD, islands of two": {"every": EVERY, "island": 2},
    "local SGD, 16, islands of two": {"every": EVERY // 2, "island": 2},
    "local SGD, 21, islands of two": {"every": 21, "island": 2},
    "DES-LOC, islands of two": {
        "every": {"params": EVERY, "mu": 3 * EVERY, "nu": 6 * EVERY},
        "island": 2,
    },
    "SlowMo, islands of two": {"every": EVERY, "island": 2, "outer": optax.sgd(1.0, momentum=0.5)},
    "DiLoCo, islands of two": {"every": EVERY, "island": 2, "outer": NESTEROV},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--losses", action="store_true", help="trains on devices of one CPU, and evaluates"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first seed; the file keeps the others"
    )
    parser.add_argument(
        "--steps", type=int, default=None, help="default: 64 for bytes, 2000 for losses"
    )
    parser.add_argument("--quick", action="store_true", help="few steps, nothing is saved")
    parser.add_argument(
        "--rank", nargs=3, help=argparse.SUPPRESS
    )  # backend, steps, path: this is one of the ranks
    args = parser.parse_args()
    if args.rank:
        backend, steps, path = args.rank
        rank(backend, args.methods, int(steps), Path(path))
    elif args.losses:
        steps = args.steps or (20 if args.quick else 2000)
        for seed in range(args.first, args.first + (1 if args.quick else args.seeds)):
            for method in args.methods:
                measured = {method: {str(seed): test_loss(method, seed, steps)}}
                keep("losses", str(steps), measured, quick=args.quick)
    else:
        steps = args.steps or 2 * EVERY
        methods = list(dict.fromkeys(["DDP", *args.methods]))
        for backend in args.backends:
            measured = ask(
                backend, BETWEEN, __file__, "--methods", *methods, "--rank", backend, steps, each=2
            )
            ddp = measured["DDP"]["bytes_a_step"]
            for method, entry in measured.items():
                entry["of_ddp"] = round(entry["bytes_a_step"] / ddp, 4)
                print(f"{backend}, {method}: {entry}", flush=True)
            keep("bytes", backend, measured, quick=args.quick)


def test_loss(method: str, seed: int, steps: int) -> float:
    """Trains four replicas of this process, and evaluates."""
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    loss, _, seconds = train(fddp.init("local"), byte_gpt(seed, steps), seed, METHODS[method])
    print(f"seed {seed}, {method}: {loss:.4f} after {seconds:.0f} s", flush=True)
    return round(loss, 5)


def rank(backend: str, methods: list[str], steps: int, path: Path) -> None:
    """One of two ranks of a host: rank 0 reads the counters of its host."""
    group = fddp.init(backend)
    if group.rank % 2 == 0:
        shape(TWO.names[group.rank // 2], "lo", INSIDE, "256kb")
    group.barrier()
    entries: dict[str, Any] = {}
    for method in methods:
        local = METHODS[method]
        problem = byte_gpt(0, steps)
        optimizer = fddp.local_steps(problem.optimizer, **local) if local else problem.optimizer
        step = fddp.train_step(problem.loss_fn, optimizer, group=group, schedule="staged")
        state = step.init(problem.params)
        batches = [group.rows(batch) for batch in islice(problem.batches(0), steps)]
        for batch in batches[:EVERY]:  # compiles all kinds of steps
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        group.barrier()
        before = counters()
        begin = time.perf_counter()
        for batch in batches:
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        group.barrier()
        duration = time.perf_counter() - begin
        nbytes = (counters() - before) / steps
        entries[method] = {
            "bytes_a_step": round(float(nbytes)),
            "ms_a_step": round(1e3 * duration / steps, 1),
        }
    if group.is_main:
        path.write_text(json.dumps(entries))


def counters() -> int:
    """Bytes that this host's end of the wire has sent and received, by the kernel."""
    counters_json = json.loads(subprocess.check_output(["ip", "-j", "-s", "link", "show", "wire"]))
    return sum(counters_json[0]["stats64"][way]["bytes"] for way in ("rx", "tx"))


def keep(kind: str, key: str, entries: dict[str, Any], *, quick: bool) -> None:
    """Adds results to those of the file."""
    if quick:
        return
    results = saved("thin_wire")
    of_kind = results.setdefault(kind, {})
    before = of_kind.get(key, {})
    of_kind[key] = before | {
        method: before.get(method, {}) | entry for method, entry in entries.items()
    }
    print(save("thin_wire", results), summary(results), flush=True)


def summary(results: dict[str, Any]) -> str:
    """Mean losses over seeds, against DDP's of the same seeds."""
    lines = [""]
    for steps, entries in results.get("losses", {}).items():
        ddp = entries.get("DDP", {})
        for method, entry in entries.items():
            seeds = sorted(entry.keys() & ddp.keys())
            share = (
                np.mean([entry[seed] for seed in seeds]) / np.mean([ddp[seed] for seed in seeds])
                if seeds
                else np.nan
            )
            lines.append(f"{steps} steps, {method}: {share:.4f} of DDP's ({len(seeds)} seeds)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
