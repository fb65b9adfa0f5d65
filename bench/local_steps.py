r"""Separate training between exchanges: what does it cost in test loss, and save in bytes?

    python bench/local_steps.py [--seeds 2] [--quick]

Four replicas on devices of one CPU, a GPT of bytes (1.6 million parameters, Python's own sources)
with AdamW, equal rows for all methods. Bytes are those of each replica in the whole training.

Source: the figures of Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2020), and
Douillard et al., "DiLoCo" (2023).
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.record import question, save
from models import data, gpt

REPLICAS = 4
MODEL = gpt.PRESETS["bytes"]
LENGTH = 64
MiB = 2**20


def main() -> None:
    parser = question(__doc__, "8 steps of two methods")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    group = fddp.init("local")
    steps = 8 if args.quick else 256
    runs = {
        method: [
            train(group, seed, steps, local) for seed in range(1 if args.quick else args.seeds)
        ]
        for method, local in islice(methods(steps).items(), 2 if args.quick else None)
    }
    ddp = np.mean(runs["DDP"], axis=0)
    results = dict[str, Any]()
    for method, pairs in runs.items():
        losses, mib = zip(*pairs)
        of_ddp = np.mean(pairs, axis=0) / ddp
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"{method:20} test loss {shown}, {of_ddp[0]:.3f} of DDP's, bytes {of_ddp[1]:.4f}")
        results[method] = {"test_loss": np.round(losses, 5).tolist(), "mib_sent": round(mib[0], 4)}
    if not args.quick:
        print(save("local_steps", {"replicas": REPLICAS, "steps": steps, "methods": results}))


def methods(steps: int) -> dict[str, dict[str, Any] | None]:
    """Arguments of `fddp.local_steps`, by name; None without."""
    slowmo = optax.sgd(1.0, momentum=0.5)
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return {
        "DDP": None,
        **{f"local SGD, {k}": {"every": k} for k in (2, 8, 32)},
        **{f"post-local SGD, {k}": {"every": k, "start": steps // 2} for k in (8, 32)},
        **{f"SlowMo, {k}": {"every": k, "outer": slowmo} for k in (8, 32)},
        **{f"DiLoCo, {k}": {"every": k, "outer": nesterov} for k in (8, 32)},
    }


def train(
    group: fddp.Group, seed: int, steps: int, local: dict[str, Any] | None
) -> tuple[float, float]:
    """Test loss, and MiB that each replica sent."""
    rows, test_rows = data.read_text(None, LENGTH)
    with_metrics = gpt.loss_fn(MODEL)

    def loss_fn(params: Any, batch: Any) -> Any:
        return with_metrics(params, batch)[0]

    def batches() -> Iterator[Any]:
        for chosen in fddp.samples(len(rows), 16, seed=seed, drop_last=True):
            yield {"tokens": rows[chosen].astype(np.int32)}

    example = {"tokens": jnp.zeros((1, LENGTH + 1), jnp.int32)}
    params, _ = gpt.init(MODEL, jax.random.key(seed), example)
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    optimizer = inner if local is None else fddp.local_steps(inner, **local)
    step = fddp.train_step(loss_fn, optimizer, group=group)
    state = step.init(params)
    nbytes = 0
    for batch in islice(batches(), steps):
        state, info = step(state, batch)
        nbytes += int(np.sum(np.asarray(info.sent), dtype=np.int64))
    tests = np.random.default_rng(0).permutation(len(test_rows))[:256].reshape(8, 32)
    held_out = [{"tokens": test_rows[chosen].astype(np.int32)} for chosen in tests]
    return fddp.evaluate(loss_fn, state, held_out, group=group), nbytes / MiB


if __name__ == "__main__":
    main()
