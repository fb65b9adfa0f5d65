"""Synchronizing only every k-th batch: how much does it save, and how much does it cost? (Paper,
figures 10 and 11.)

    sudo .venv/bin/python bench/skipping.py [--backends Gloo MPI] [--quick]

Speed: `step.no_sync` for k - 1 batches and then a step, on two hosts joined by 1 Gbit/s
(bench/two_hosts.py), one core each; the MLP of 640 rows, 8 batches in a turn for every k.
Convergence: a perceptron of 85,000 parameters on scikit-learn's digits (the paper: MNIST), two
replicas in one process, plain SGD; the loss of every batch (where k batches are synchronized, that
of all k) under a low-pass filter of order 3, as in the paper. A batch is the rows of all replicas.
"""

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.problems import Problem
from bench.record import save
from bench.turns import on_two_hosts, take_turns, training
from models import data, mlp

EVERY = (1, 2, 4, 8)
BATCHES = 8  # in a turn
CAP_MB = 4.0
REPLICAS = 2
PANELS = {8: 0.02, 256: 0.06}  # rows of a batch: learning rate
MODEL = mlp.MLP((64, 256, 256, 10))


def main() -> None:
    args = on_two_hosts(__doc__, ["mlp640"], rounds=5).parse_args()
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    fddp.init("local")
    speed = take_turns(__file__, args, steps=BATCHES)
    count, every = (16, EVERY[:1]) if args.quick else (400, EVERY)
    last = dict[str, dict[int, float]]()
    for rows, rate in PANELS.items():
        losses = {k: train(rows, rate, k, count) for k in every}
        last[f"{rows} rows, rate {rate}"] = {k: mean_of_last(x) for k, x in losses.items()}
    for title, losses in last.items():
        print(f"mean loss of the last tenth of the batches, {title}: every {losses}")
    if not args.quick:
        print(save("skipping", {"speed": speed, "batches": count, "last_loss": last}))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """A turn with a synchronization every k batches."""
    return {
        f"{k}": training(task, group, CAP_MB, pending_calls=k - 1, steps=BATCHES // k)
        for k in EVERY
    }


def train(rows: int, rate: float, every: int, count: int) -> list[float]:
    """Losses of so many batches, with an update after every k-th one."""
    images, labels, *_ = data.split_digits()
    images = ((images - images.mean()) / images.std()).astype(np.float32).reshape(-1, 64)
    # DDP adds the gradients of k batches up, fddp takes their mean: k times the rate is the same
    # step.
    step = fddp.train_step(loss_fn, optax.sgd(rate * every))
    state = step.init(MODEL.init(jax.random.key(0), images[:1]))
    losses = []
    order = fddp.samples(len(images), rows, seed=0, drop_last=True)
    for turn, chosen in enumerate(islice(order, count)):
        batch = {"image": images[chosen], "label": labels[chosen].astype(np.int32)}
        state, info = (step.no_sync if (turn + 1) % every else step)(state, batch)
        losses.append(
            float(info.loss)
        )  # waits: of many steps under way XLA's few threads may all wait for each other
    return losses


def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = jnp.asarray(MODEL.apply(params, batch["image"]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def mean_of_last(losses: list[float]) -> float:
    """The mean of the last tenth."""
    return round(float(np.mean(losses[-len(losses) // 10 :])), 5)


if __name__ == "__main__":
    main()
