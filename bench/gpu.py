"""What do packing, the audit and NCCL do on a GPU that is really there?

    python bench/gpu.py [--quick]

With bench/overhead.py this is all that needs a GPU; where there is none it asks the CPU the same, over Gloo.

  packing  pack and unpack of all gradients, over a copy of as many bytes: the floor that the memory sets
  ranks    two ranks that share the GPU (NCCL 2.30 or later): their losses beside one replica's on the joined rows, and
           what runs here beside what is compiled ahead of time for two of these GPUs
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fddp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.jobs import ending, start
from bench.record import interleave, ratio, save
from fddp.analysis.auditing.gpus import CHIPS
from fddp.analysis.auditing.report import Audit
from fddp.analysis.workload import read_model
from fddp.buckets.packing import pack, unpack

RANKS, STEPS, PATIENCE_S = 2, 10, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packing", nargs="+", default=("gpt:360m", "resnet:50"), help="model:preset, of models/")
    parser.add_argument("--ranks", default="gpt:tiny:8", help="model:preset:rows of each rank")
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing is saved")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)  # model:preset:rows, path: this is one of the ranks
    args = parser.parse_args()
    if args.rank:
        return train(*args.rank)
    # The ranks first: afterwards this process holds most of the GPU's memory.
    results: dict[str, Any] = {"ranks": ranks(args.ranks)}
    results["packing"] = {name: packing(name, rounds=5 if args.quick else 50) for name in args.packing}
    print(json.dumps(results, indent=1))
    if not args.quick:
        print(save("gpu", results))
    return None


def packing(name: str, rounds: int) -> dict[str, Any]:
    """Times packing and unpacking a model's gradients, and a copy of the buckets, in turn."""
    params, _, _, _ = _model(f"{name}:1")
    plan = fddp.make_plan(params)
    packed = jax.jit(lambda tree: pack(plan, tree))
    buckets = packed(params)
    opened = jax.jit(lambda buckets: unpack(plan, buckets))
    # Adding a number that is not known beforehand: XLA would hand a mere copy through.
    copied = jax.jit(lambda tree, zero: jax.tree.map(lambda x: x + zero.astype(x.dtype), tree))
    zero = jax.numpy.zeros(())
    seconds = interleave(
        {"copy": lambda: copied(buckets, zero), "pack": lambda: packed(params), "unpack": lambda: opened(buckets)},
        rounds=rounds,
    )
    return {
        "MiB": sum(bucket.nbytes for bucket in plan.buckets) / 2**20,
        "buckets": len(plan.buckets),
        **{f"{way}_us": 1e6 * float(np.median(values)) for way, values in seconds.items()},
        **{f"{way} / copy": ratio(seconds[way], seconds["copy"]) for way in ("pack", "unpack")},
    }


def ranks(name: str) -> dict[str, Any]:
    """Starts two ranks on this machine's first device and compares them with one replica; or says why they failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "said.json"
        env = {
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "0",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(0.8 / RANKS),
            "NPROC": "2",
        }
        command = [sys.executable, __file__, "--rank", name, str(path)]
        pipes: Any = {"stderr": subprocess.PIPE, "text": True}
        with ending(start("nccl", RANKS, command, env, **pipes)) as jobs:
            try:
                said = [job.communicate(timeout=PATIENCE_S)[1] for job in jobs]
            except subprocess.TimeoutExpired:
                return {"failed": f"no end after {PATIENCE_S} s"}
        if any(job.returncode for job in jobs):
            return {"failed": [text[-2000:] for text in said]}
        return json.loads(path.read_text())


def train(name: str, path: str) -> None:
    """One rank's part: some steps and an audit; rank 0 trains alone on the joined rows too, and writes both down."""
    group = fddp.init()
    params, model_state, loss_fn, batch = _model(name)
    rows = len(jax.tree.leaves(batch)[0]) // RANKS
    mine = jax.tree.map(lambda x: x[group.rank * rows : (group.rank + 1) * rows], batch)
    optimizer = optax.adamw(1e-3)

    def losses(step: fddp.TrainStep, batch: Any) -> list[float]:
        state, told = step.init(params, model_state=model_state), list[float]()
        for _ in range(STEPS):
            state, info = step(state, batch)
            told.append(float(info.loss))
        return told

    step = fddp.train_step(loss_fn, optimizer, group=group, has_aux=True, schedule="fused", bucket_cap_mb=0.1)
    together = losses(step, mine)
    state = step.init(params, model_state=model_state)
    here = fddp.audit(step, state, mine)
    kind = jax.local_devices()[0].device_kind
    chip = next((chip for chip in CHIPS if chip in kind.lower()), None)
    ahead = fddp.audit(step, state, batch, target=f"{chip}:{RANKS}") if chip else None
    alone = fddp.train_step(loss_fn, optimizer, group=group.subgroup([group.rank]), has_aux=True)
    by_itself = losses(alone, batch)
    if group.rank == 0:
        said = {
            "device": kind,
            "backend": group.backend,
            "losses": together,
            "alone": by_itself,
            "largest_difference": float(np.max(np.abs(np.subtract(together, by_itself)))),
            "here": _told(here),
            "ahead_of_time": None if ahead is None else _told(ahead),
        }
        Path(path).write_text(json.dumps(said))


def _told(audit: Audit) -> dict[str, Any]:
    return {
        "buckets": len(audit.plan.buckets),
        "collectives": len(audit.collectives),
        "asynchronous": sum(collective.asynchronous for collective in audit.collectives),
        "starts": [audit.label(k) for k in range(len(audit.collectives))],
        "heavy_in_flight": [collective.heavy for collective in audit.collectives],
        "heavy": audit.heavy,
        "flops": audit.flops,
        "problems": audit.problems(),
    }


def _model(name: str) -> tuple[Any, Any, Any, Any]:
    """Parameters, buffers, loss, and the rows of all ranks together."""
    workload, _, rows = name.rpartition(":")
    module, preset = read_model(f"models.{workload}")
    model = module.PRESETS[preset]
    batch = module.batch(model, RANKS * int(rows))
    params, model_state = module.init(model, jax.random.key(0), batch)
    return params, model_state, module.loss_fn(model), batch


if __name__ == "__main__":
    main()
