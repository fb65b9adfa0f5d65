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
from bench.record import save
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", nargs="+", default=["mlp", "digits", "gpt"], choices=["mlp", "digits", "gpt"]
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true", help="5 steps, nothing is saved")
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return one_rank(*args.rank)
    steps = 5 if args.quick else args.steps
    results = dict[str, Any]()
    for name in args.problems:
        digest_of = {}
        for virtual in (VIRTUAL, 0):
            runs = (
                RUNS
                if virtual
                else [run for run in RUNS if run[:2] in (("local", 2), ("local", 4))]
            )
            for backend, size, cap in runs:
                words = [
                    sys.executable,
                    __file__,
                    "--rank",
                    backend,
                    name,
                    str(steps),
                    str(virtual),
                    str(size),
                    str(cap),
                ]
                title = f"{backend} {size}, {cap} MiB" + ", ordinary" * (not virtual)
                digest_of[title] = digest = ask(backend, size, words)
                print(f"{name:7} {title:36} {digest}", flush=True)
        digests = {digest for title, digest in digest_of.items() if "ordinary" not in title}
        results[name] = {"equal": len(digests) == 1, "digests": digest_of}
        print(f"{name:7} {'equal' if len(digests) == 1 else 'DIFFERENT'}", flush=True)
    if not args.quick:
        print(save("bits", {"steps": steps, "virtual_replicas": VIRTUAL} | results))
    return None


def ask(backend: str, size: int, words: list[str]) -> str:
    """Trains in processes of their own, and returns the last line of rank 0."""
    env, ranks = ({"JAX_NUM_CPU_DEVICES": str(size)}, 1) if backend == "local" else ({}, size)
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    if backend == "local":
        output = subprocess.run(
            words, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    else:
        with ending(start(backend, ranks, words, env, stdout=subprocess.PIPE, text=True)) as jobs:
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
    step = fddp.train_step(
        loss_fn,
        optimizer,
        group=group,
        has_aux=True,
        bucket_cap_mb=float(cap),
        first_bucket_mb=float(cap),
        broadcast_buffers="mean",
        virtual_replicas=int(virtual) or None,
    )
    state = step.init(params, model_state=model_state, rng=jax.random.key(1))
    losses = []
    rows = fddp.samples(
        len(data[0]),
        2 * VIRTUAL,
        rank=group.rank,
        size=group.processes,
        virtual_replicas=int(virtual) or None,
    )
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
