"""Trains a Linen module on handwritten digits, and shows the same loop with Flax's TrainState.

python models/with_linen.py                           one replica

mpiexec -n 2 python models/with_linen.py              two processes over MPI

JAX_NUM_CPU_DEVICES=4 python models/with_linen.py     four devices of one process

With Flax's TrainState, its batch_stats added as in Flax's own example of ImageNet:

    variables = module.init(key, images)
    state = TrainState.create(apply_fn=module.apply, params=…, tx=optimizer, batch_stats=…)
    (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"])

With fddp:

    params, buffers = net.init(key, batch)
    step = fddp.train_step(net.loss_fn, optimizer, group=group)
    state = step.init(params, model_state=buffers)
    state, info = step(state, batch)

Code that evaluates, logs or saves a Flax TrainState need not change: `as_flax` makes one, of the
same arrays.
"""

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.training import train_state
from jaxtyping import Array, Float

import fddp

sys.path.append(
    str(Path(__file__).parents[1])
)  # where models is, with fddp installed and run from anywhere
from models import data


class Network(nn.Module):
    """Ten logits for each image of 8 × 8 pixels."""

    @nn.compact
    def __call__(
        self, images: Float[Array, "B 8 8 1"], train: bool = False
    ) -> Float[Array, "B 10"]:
        x = nn.Conv(16, (3, 3))(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


class FlaxState(train_state.TrainState):
    """Flax's, as a script has it that trained on one device."""

    batch_stats: Any


def loss(model: Any, batch: Any) -> Array:
    """The mean cross entropy; `model` is called as the bound module."""
    logits = model(batch["image"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def accuracy(state: FlaxState, batch: Any) -> Array:
    """The share of images that are read right: a function of Flax's state, as it was."""
    logits = state.apply_fn(
        {"params": state.params, "batch_stats": state.batch_stats}, batch["image"]
    )
    return jnp.mean(logits.argmax(-1) == batch["label"])


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

    module = Network()
    optimizer = optax.adamw(3e-3)
    net = fddp.from_linen(module, loss)
    params, buffers = jax.jit(net.init)(jax.random.key(seed), rows_of(images[:1], labels[:1]))
    step = fddp.train_step(net.loss_fn, optimizer, group=group)
    state = step.init(params, model_state=buffers, rng=jax.random.key(seed))

    rows = fddp.samples(len(images), batch, rank=group.rank, size=group.processes, seed=seed)
    for number, chosen in zip(range(1, steps + 1), rows):
        state, info = step(state, rows_of(images[chosen], labels[chosen]))
        if number == 1 or number % max(1, steps // 4) == 0:
            group.print(f"step {number}, loss {info.loss:.3f}")

    test_rows = rows_of(*group.rows(held_out))
    share = fddp.evaluate(accuracy, as_flax(state, module, optimizer), [test_rows], group=group)
    group.print(f"{group.size} replicas, test accuracy {share:.1%}")


def as_flax(
    state: fddp.TrainState, module: nn.Module, optimizer: optax.GradientTransformation
) -> FlaxState:
    """The same arrays in Flax's state; the next step deletes them, as it writes where they lie."""
    return FlaxState(
        step=state.step,
        apply_fn=module.apply,
        params=state.params,
        tx=optimizer,
        opt_state=state.opt_state,
        **state.model_state,
    )


if __name__ == "__main__":
    tyro.cli(main)
