"""Trains an nnx module, with BatchNorm and dropout, to tell handwritten digits apart.

python models/with_nnx.py                           one replica

mpiexec -n 2 python models/with_nnx.py              two processes over MPI

JAX_NUM_CPU_DEVICES=4 python models/with_nnx.py     four devices of one process

Module and loss are those of one device. `fddp.from_nnx` makes a pure loss, parameters and buffers
of them. At the end `net.module(state)` is the trained module, which is evaluated as any other.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jaxtyping import Array, Float

import fddp

sys.path.append(
    str(Path(__file__).parents[1])
)  # where models is, with fddp installed and run from anywhere
from models import data


class Network(nnx.Module):
    """Ten logits for each image of 8 × 8 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images: Float[Array, "B 8 8 1"]) -> Float[Array, "B 10"]:
        x = nnx.relu(self.norm(self.first(images)))
        x = nnx.relu(self.second(x))
        return self.out(self.dropout(x.reshape(len(x), -1)))


def loss(model: Network, batch: Any) -> Array:
    """The mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["image"]), batch["label"]
    ).mean()


def accuracy(model: Network, batch: Any) -> Array:
    """The share of images that are read right."""
    return jnp.mean(model(batch["image"]).argmax(-1) == batch["label"])


def main(steps: int = 300, batch: int = 64, seed: int = 0, quick: bool = False) -> None:
    """Trains on 1,500 of scikit-learn's digits and tests on the other 297.

    Args:
      steps: updates of the parameters.
      batch: rows a step, over all replicas.
      seed: decides the first parameters, the order of rows, and the dropped units.
      quick: few steps, as the tests run it.
    """
    steps = 40 if quick else steps
    group = fddp.init()
    images, labels, *held_out = data.split_digits()

    def rows_of(images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "image": (images[..., None] / 16).astype(np.float32),
            "label": labels.astype(np.int32),
        }

    net = fddp.from_nnx(Network(nnx.Rngs(seed)), loss)
    step = fddp.train_step(net.loss_fn, optax.adamw(3e-3), group=group)
    state = step.init(net.params, model_state=net.model_state, rng=jax.random.key(seed))

    rows = fddp.samples(len(images), batch, rank=group.rank, size=group.processes, seed=seed)
    for number, chosen in zip(range(1, steps + 1), rows):
        state, info = step(state, rows_of(images[chosen], labels[chosen]))
        if number == 1 or number % max(1, steps // 4) == 0:
            group.print(f"step {number}, loss {info.loss:.3f}")

    model = net.module(state)
    model.eval()  # BatchNorm reads its running averages, dropout drops nothing
    test_rows = rows_of(*group.rows(held_out))
    share = fddp.evaluate(accuracy, model, [test_rows], group=group)
    group.print(f"{group.size} replicas, test accuracy {share:.1%}")


if __name__ == "__main__":
    tyro.cli(main)
