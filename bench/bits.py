"""Do the bits of a training with virtual replicas depend on the number of replicas, the backend or
the bucket cap?

    .venv/bin/python bench/bits.py [--problems mlp digits gpt] [--quick]

Each problem is trained on 1, 2, 4 and 8 devices of a process, on 1, 2 and 4 processes over Gloo,
and on 1 to 4 over MPI, with other bucket caps, always of 24 virtual replicas: AdamW with clipping
and a dynamic loss scale. The digests of the whole state and of all losses are compared. "ordinary"
is a training without virtual replicas, whose bits differ: the comparison is not blind.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.jobs import ending, start
from bench.record import question, save
from models import gpt, mlp, resnet
from models.data import split_digits

VIRTUAL = 24
STEPS = 200
# Backend, replicas, bucket cap in MiB.
RUNS = [
    ("local", 1, 25.0),
    ("local", 2, 25.0),
    ("local", 4, 0.0),
    ("local", 8, 0.01),
    ("gloo", 1, 25.0),
    ("gloo", 2, 0.01),
    ("gloo", 4, 25.0),
    ("mpi", 1, 0.01),
    ("mpi", 2, 0.0),
    ("mpi", 3, 0.01),
    ("mpi", 4, 0.01),
]


def main() -> None:
    parser = question(__doc__, "5 steps of the MLP in four runs")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return one_rank(*args.rank)
    steps = 5 if args.quick else STEPS
    results = dict[str, Any]()
    for name in args.problems[:1] if args.quick else args.problems:
        runs = RUNS[2::6] if args.quick else RUNS
        digests = {run: ask(*run, name, steps, VIRTUAL) for run in runs}
        ordinary = {run: ask(*run, name, steps, 0) for run in RUNS[1:3]}
        titled = {f"{x} {size}, {cap} MiB": found for (x, size, cap), found in digests.items()}
        titled |= {f"ordinary, {x} {size}": found for (x, size, _), found in ordinary.items()}
        equal = len(set(digests.values())) == 1
        results[name] = {"equal": equal, "digests": titled}
        for title, digest in titled.items():
            print(f"{name:7} {title:36} {digest}", flush=True)
        print(f"{name:7} {'equal' if equal else 'DIFFERENT'}", flush=True)
    if not args.quick:
        print(save("bits", {"steps": steps, "virtual_replicas": VIRTUAL} | results))
    return None


def ask(backend: str, size: int, cap: float, name: str, steps: int, virtual: int) -> str:
    """Trains in processes of their own, and returns the last line of rank 0."""
    words = map(str, (backend, name, steps, virtual, size, cap))
    command = [sys.executable, __file__, "--rank", *words]
    env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes: Any = {"stdout": subprocess.PIPE, "text": True}
    if backend == "local":
        env = os.environ | env | {"JAX_NUM_CPU_DEVICES": str(size)}
        jobs = [subprocess.Popen(command, env=env, **pipes)]
    else:
        jobs = start(backend, size, command, env, **pipes)
    with ending(jobs):
        output = jobs[0].communicate()[0]
    return next(line for line in output.splitlines() if line.startswith("digest "))


def one_rank(backend: str, name: str, steps: str, virtual: str, size: str, cap: str) -> None:
    """One rank's part."""
    group = fddp.init(backend)
    if group.size != int(size):
        raise RuntimeError(f"this is a job of {group.size} replicas, not of {size}.")
    loss_fn, (params, model_state), data = PROBLEMS[name]()
    optimizer = fddp.dynamic_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        initial=2.0**10,
        growth_interval=20,
    )
    options: Any = dict.fromkeys(("bucket_cap_mb", "first_bucket_mb"), float(cap))
    options |= {"virtual_replicas": int(virtual) or None, "broadcast_buffers": "mean"}
    step = fddp.train_step(loss_fn, optimizer, group=group, has_aux=True, **options)
    state = step.init(params, model_state=model_state, rng=jax.random.key(1))
    losses = []
    deal: Any = {"rank": group.rank, "size": group.processes}
    deal["virtual_replicas"] = int(virtual) or None
    rows = fddp.samples(len(data[0]), 2 * VIRTUAL, **deal)
    for chosen in islice(rows, int(steps)):
        state, info = step(state, [x[chosen] for x in data])
        losses.append(np.asarray(info.loss))
    if group.rank == 0:
        state = state._replace(rng=None)
        final_bytes = b"".join(np.asarray(x).tobytes() for x in (*losses, *jax.tree.leaves(state)))
        print(
            f"digest {hashlib.sha256(final_bytes).hexdigest()[:16]} last loss {losses[-1]:.6f}",
            flush=True,
        )


def net() -> tuple[Any, Any, list[np.ndarray]]:
    """An MLP."""
    model = mlp.PRESETS["tiny"]
    rows = mlp.batch("tiny", 480)
    loss = mlp.loss_fn(model)

    def loss_fn(params: Any, batch: Any, *, rng: Any) -> Any:
        del rng
        return loss(params, {"input": batch[0], "target": batch[1]})

    return loss_fn, mlp.init(model, jax.random.key(0), rows), [rows["input"], rows["target"]]


def digits() -> tuple[Any, Any, list[np.ndarray]]:
    """A ResNet with BatchNorm on handwritten digits, some of whose pixels are dropped."""
    model = resnet.PRESETS["tiny"]
    (images, labels, *_) = split_digits()
    data = [np.float32(images[..., None].repeat(3, axis=-1) / 16), np.int32(labels)]
    first = {"image": data[0][:2], "label": data[1][:2]}
    loss = resnet.loss_fn(model)

    def loss_fn(params: Any, batch: Any, *, model_state: Any, rng: Any) -> Any:
        dropped_out = nn.Dropout(0.2, deterministic=False).apply(
            {}, batch[0], rngs={"dropout": rng}
        )
        return loss(params, {"image": dropped_out, "label": batch[1]}, model_state=model_state)

    return loss_fn, resnet.init(model, jax.random.key(0), first), data


def text() -> tuple[Any, Any, list[np.ndarray]]:
    """A GPT with dropout, whose rows have more and fewer tokens."""
    model = gpt.GPT(
        256, layers=2, width=64, heads=4, kv_heads=2, hidden=128, context=32, dropout=0.1
    )
    rows = gpt.batch(model, 480)
    data = [rows["tokens"], np.random.default_rng(1).integers(8, 33, size=(480, 1))]

    def loss_fn(params: Any, batch: Any, *, rng: Any) -> Any:
        tokens, length = batch
        logits: Any = model.apply({"params": params}, tokens[:, :-1], rngs={"dropout": rng})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        counts = jnp.arange(losses.shape[1]) < length
        number = jnp.sum(counts)
        return fddp.Weighted(jnp.sum(losses * counts) / number, number), {}

    return loss_fn, gpt.init(model, jax.random.key(0), rows), data


PROBLEMS = {"mlp": net, "digits": digits, "gpt": text}


if __name__ == "__main__":
    main()
