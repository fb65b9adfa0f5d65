"""Trains two encoders by contrast, as CLIP does: each picture against all texts, and each text
against all pictures.

python models/clip.py                                one replica

mpiexec -n 2 python models/clip.py                   two processes over MPI

JAX_NUM_CPU_DEVICES=4 python models/clip.py          four devices of one process

A loss sees the rows of one replica. It gathers the embeddings of all, so that it is the loss of the
joined batch on any number of replicas. Pictures and texts are drawn: a pair shows the same eight
hidden numbers, each in its own way.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision"
(2021).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float

import fddp

HIDDEN = 8
PIXELS = 64
WORDS = 32
ROWS = 128  # of all replicas together


class Encoder(nn.Module):
    """A vector of length 1 for each row."""

    width: int = 64
    features: int = 16

    @nn.compact
    def __call__(self, x: Float[Array, "B n"]) -> Float[Array, "B d"]:
        x = nn.Dense(self.features)(nn.gelu(nn.Dense(self.width)(x)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def main(steps: int = 400, quick: bool = False) -> None:
    """Trains, and says for how many new pictures the right text is the nearest.

    Args:
      steps: how many.
      quick: fewer of them, for a look.
    """
    group = fddp.init()
    steps = 60 if quick else steps
    params = init(jax.random.key(0))
    step = fddp.train_step(loss_fn(group.axis_name), optax.adam(3e-3), group=group)
    state = step.init(params)
    local_rows = slice(
        group.rank * ROWS // group.processes, (group.rank + 1) * ROWS // group.processes
    )
    losses: list[Any] = []
    for k in range(steps):
        state, info = step(state, jax.tree.map(lambda x: x[local_rows], pairs(ROWS, seed=k)))
        losses.append(info.loss)
    accuracy = recall(jax.device_get(state.params), pairs(ROWS, seed=steps))
    if group.rank == 0:
        print(f"{group.size} replicas, {ROWS} pairs in each step, each against all others")
        print(f"loss {float(losses[0]):.3f} → {float(losses[-1]):.3f} in {steps} steps")
        print(
            f"the right text is the nearest for {accuracy:.0%} of new pictures, by chance for "
            f"{1 / ROWS:.1%}"
        )


def init(key: jax.Array) -> dict[str, Any]:
    """Fresh parameters of both encoders, and of the temperature."""
    image, text = jax.random.split(key)
    return {
        "image": Encoder().init(image, jnp.ones((1, PIXELS)))["params"],
        "text": Encoder().init(text, jnp.ones((1, WORDS)))["params"],
        "scale": jnp.log(1 / 0.07),
    }


def loss_fn(axis_name: str | None) -> Any:
    """Returns the mean cross entropy of the right partner among all, in both directions.

    Args:
      axis_name: the axis of the replicas.
    """

    def loss(params: dict[str, Any], batch: dict[str, Float[Array, "B n"]]) -> Float[Array, ""]:
        image = embedded(params, "image", batch)
        text = embedded(params, "text", batch)
        first = jax.lax.axis_index(axis_name) * len(image)
        labels = first + jnp.arange(len(image))

        def among_all(queries: Float[Array, "B d"], keys: Float[Array, "B d"]) -> Float[Array, ""]:
            everybody = jax.lax.all_gather(keys, axis_name, tiled=True)
            scores = jnp.exp(params["scale"]) * queries @ everybody.T
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))

        return (among_all(image, text) + among_all(text, image)) / 2

    return loss


def embedded(
    params: dict[str, Any], name: str, batch: dict[str, Float[Array, "B n"]]
) -> Float[Array, "B d"]:
    """One tower's embeddings."""
    return jnp.asarray(Encoder().apply({"params": params[name]}, batch[name]))


def pairs(rows: int, seed: int) -> dict[str, Float[np.ndarray, "rows n"]]:
    """Draws pictures and their texts, the same on all ranks."""
    world = np.random.default_rng(0)
    maps = {
        name: world.normal(size=(HIDDEN, size))
        for name, size in (("image", PIXELS), ("text", WORDS))
    }
    draw = np.random.default_rng((1, seed))
    hidden = draw.normal(size=(rows, HIDDEN))
    views = {
        name: np.tanh(hidden @ m) + 0.1 * draw.normal(size=(rows, m.shape[1]))
        for name, m in maps.items()
    }
    return {name: x.astype(np.float32) for name, x in views.items()}


def recall(params: dict[str, Any], batch: dict[str, Any]) -> float:
    """The share of pictures to which their own text is the nearest."""
    scores = embedded(params, "image", batch) @ embedded(params, "text", batch).T
    return float(jnp.mean(scores.argmax(-1) == jnp.arange(len(scores))))


if __name__ == "__main__":
    tyro.cli(main)
