"""Does a model train with a state larger than the memory of each rank, and resume from a
checkpoint?

    python -m bench.beyond_memory [mpi|gloo] [--ranks 4] [--limit 2600] [--quick]

A GPT of 252 million parameters, with Adam's moments 2.8 GiB, in shards that are gathered twice a
step. The kernel holds each rank to a limit below that (`limits.py`). The first job makes the state
by a function, trains, saves, and trains on. The second one, of new processes, restores the
checkpoint into a form and takes the same steps: their losses and the bits of the last parameters
have to be the same. A third job requests a whole state, and has to be killed by the limit. The
results are the peaks of the ranks' resident memory in each job, with Python, JAX and its compiler.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from typing import Any

from bench.limits import forget, limit

SIZES = {
    "large": (4, 2048, 8192, 2600),
    "small": (2, 128, 256, 0),
}  # layers, width, hidden, MiB of the limit
STEPS = 2  # before the save, and after it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="mpi", choices=("mpi", "gloo"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=int, help="of each rank, MiB")
    parser.add_argument(
        "--quick", action="store_true", help="a small model, without a limit; nothing is saved"
    )
    args = parser.parse_args()
    size = "small" if args.quick else "large"
    results = run_jobs(args.backend, args.ranks, size, args.limit)
    print(json.dumps(results, indent=1))
    if not args.quick:
        from bench.record import save

        print(save(f"beyond_memory_{args.backend}_{args.ranks}", results))


def run_jobs(backend: str, ranks: int, size: str, most: int | None = None) -> dict[str, Any]:
    """Runs the jobs; raises RuntimeError unless they train, resume and fail as they should."""
    folder = tempfile.mkdtemp()
    most = SIZES[size][-1] if most is None else most
    try:
        trained, restored = (
            job(backend, ranks, size, most, folder, act) for act in ("train", "restore")
        )
        if trained is None or restored is None:
            raise RuntimeError("a job in shards failed; its error is above.")
        if most and job(backend, ranks, size, most, folder, "whole") is not None:
            raise RuntimeError(f"a whole state fits {most} MiB: there is nothing to be shown.")
    finally:
        shutil.rmtree(folder)
        forget()
    after = trained["losses"][STEPS:]
    if (after, trained["bits"]) != (restored["losses"], restored["bits"]):
        raise RuntimeError(
            f"training went on otherwise: {after}, {restored['losses']} when restored."
        )
    return {
        "limit_mib": most,
        "trained": trained,
        "restored": restored,
        "whole": "killed" if most else "not tried",
    }


def job(
    backend: str, ranks: int, size: str, most: int, folder: str, act: str
) -> dict[str, Any] | None:
    """Runs one job; returns the results that its rank 0 prints, or None if it fails."""
    from bench.jobs import ending, start

    command = [sys.executable, "-m", "bench.beyond_memory", "rank", size, str(most), folder, act]
    env = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
        "FDDP_GRACE_S": "5",
    }
    errors = subprocess.DEVNULL if act == "whole" else None  # of being killed
    with ending(
        start(backend, ranks, command, env, stdout=subprocess.PIPE, stderr=errors, text=True)
    ) as jobs:
        texts = [process.communicate(timeout=480)[0] for process in jobs]
    printed = [line for text in texts for line in text.splitlines() if line.startswith("{")]
    return None if any(process.returncode for process in jobs) else json.loads(printed[0])


def rank(size: str, most: str, folder: str, act: str) -> None:
    """Does one rank's part; rank 0 prints the results of all."""
    held_by = limit(int(most)) if int(most) else "no limit"  # before JAX is there

    import jax
    import numpy as np
    import optax

    import fddp
    from bench.saving import resident
    from models import gpt

    layers, width, hidden, _ = SIZES[size]
    model = gpt.GPT(256, layers=layers, width=width, heads=8, kv_heads=4, hidden=hidden, context=64)
    group = fddp.init()
    before = resident("VmRSS")
    options: dict[str, Any] = (
        {} if act == "whole" else {"shard": "state", "reshard_after_forward": True}
    )
    step = fddp.train_step(
        gpt.loss_fn(model),
        optax.adam(1e-4),
        group=group,
        has_aux=True,
        schedule="staged",
        bucket_cap_mb=32,
        **options,
    )
    first = gpt.batch(model, 1, group.rank, length=16)

    def make() -> Any:
        return gpt.init(model, jax.random.key(0), first)[0]

    numbers = sum(x.size for x in jax.tree.leaves(jax.eval_shape(make)))
    losses = list[str]()

    def train(state: Any) -> Any:
        for _ in range(STEPS):
            state, info = step(
                state, gpt.batch(model, 1, 100 * int(state.step) + group.rank, length=16)
            )
            losses.append(float(info.loss).hex())
        return state

    checkpoints = fddp.Checkpoints(f"{folder}/saved", step)
    if act == "restore":
        state, _ = checkpoints.restore(step.shapes(make))
    else:
        state = train(step.init(make))
        checkpoints.save(state, now=True)
    # all is written: the copy that it is written from is gone when the next step begins
    checkpoints.close()
    state = train(state)
    digest = sha256()
    for x in jax.tree.leaves(state.params):
        digest.update(np.asarray(x.addressable_data(0)).tobytes())
    peak = round(resident("VmHWM"), 1)
    rank_reports = group.all_gather_object((held_by, round(before, 1), peak, digest.hexdigest()))
    group.print(
        json.dumps(
            {
                "held_by": sorted({rank_report[0] for rank_report in rank_reports}),
                "parameters": numbers,
                "state_mib": round(12 * numbers / 2**20, 1),
                "before_mib": [rank_report[1] for rank_report in rank_reports],
                "peak_mib": [rank_report[2] for rank_report in rank_reports],
                "losses": losses,
                "bits": sha256(
                    "".join(rank_report[3] for rank_report in rank_reports).encode()
                ).hexdigest(),
            }
        )
    )


if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
