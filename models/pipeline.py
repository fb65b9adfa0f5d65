"""Trains the GPT on a mesh of two axes: replicas along one, the stages of each replica along the
other.

python models/pipeline.py                                              two replicas of four stages

python models/pipeline.py --replicas 2 --stages 2 --micro-batches 4    four devices

Each device of a replica holds a stage: some of the layers, which follow each other. The rows of a
replica are cut into micro-batches. In one tick every stage works, each on another micro-batch; then
each hands its output to the next one. So S stages need M + S - 1 ticks for M micro-batches, and in
(S - 1) / (M + S - 1) of them a stage has nothing to do and computes with zeros: the bubble. As in
GPipe all forward ticks come before all backward ones; a stage keeps its input and computes
everything else again. PipeDream's order, one forward, one backward, keeps fewer micro-batches at
once; JAX does not produce it by differentiating a loss.

The pipeline is a loss in plain JAX, which runs on one device, too. The placement of the parameters
makes it a pipeline: XLA runs each stage where its layers are, and of the shift between two ticks it
makes a permutation of neighbours. Embedding and head lie outside, and their table is cut by tokens
over the same devices. fddp sums gradients over the replicas, of which each device sends those of
its stage. On a machine without accelerators the devices are virtual CPUs.

Sources: Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019); Xu et al., "GSPMD"
(2021), for a pipeline as a shift along a dim that is cut.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import fddp

sys.path.append(
    str(Path(__file__).parents[1])
)  # where models is, with fddp installed and run from anywhere
from models import data, gpt
from models.tensor_parallel import size_mib, two_axes

PLACES = {
    "stages": PartitionSpec("stage"),
    "embed": PartitionSpec("stage"),
    "norm": PartitionSpec(),
}


def main(
    replicas: int = 2,
    stages: int = 4,
    micro_batches: int = 8,
    layers: int = 4,
    steps: int = 60,
    seed: int = 0,
    quick: bool = False,
) -> None:
    """Trains a tiny GPT on Python's own sources.

    Args:
      replicas: how often there is the whole model.
      stages: over how many devices each replica is spread; a divisor of the layers and of the 256
        tokens.
      micro_batches: in how many parts a replica's 16 rows go through the stages; a divisor of 16.
      layers: how many the model has.
      steps: updates of the parameters.
      seed: decides the first parameters and the order of rows.
      quick: twenty steps, as the tests run it.
    """
    steps = 20 if quick else steps
    jax.config.update("jax_num_cpu_devices", replicas * stages)
    mesh = two_axes(replicas, stages, "stage")
    group = fddp.mesh_group(mesh)
    model = gpt.PRESETS["tiny"].clone(layers=layers)
    loss = loss_fn(model, micro_batches)
    step = fddp.train_step(loss, optax.adamw(1e-2), group=group, has_aux=True)
    params, _ = gpt.init(model, jax.random.key(seed), gpt.batch(model, 1))
    state = step.init(placed(in_stages(params, stages), mesh))

    rows, _ = data.read_text(None, model.context)
    random = np.random.default_rng(seed)
    losses: list[float] = []
    for _ in range(steps):
        tokens = rows[random.integers(len(rows), size=16 * group.size)].astype(np.int32)
        state, info = step(state, {"tokens": tokens})
        losses.append(float(info.loss))
    total_mib, local_mib = size_mib(state.params)
    print(f"{group.size} replicas × {stages} stages, {micro_batches} micro-batches")
    print(f"bubble {bubble(stages, micro_batches):.0%} of the ticks")
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {steps} steps")
    print(f"parameters {total_mib:.3f} MiB, of which each device holds {local_mib:.3f} MiB")
    print(step.plan)


def loss_fn(
    model: gpt.GPT, micro_batches: int
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """The loss of `gpt.loss_fn`, without dropout, for parameters in stages.

    Args:
      model: the GPT.
      micro_batches: number of parts in which the rows of a replica go through the stages.

    Returns:
      `loss(params, batch)`, with the accuracy; it raises ValueError if the rows cannot be cut so.
    """

    def loss(params: Any, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        inputs = batch["tokens"][:, :-1]
        targets = batch["tokens"][:, 1:]
        if micro_batches < 1 or len(inputs) % micro_batches:
            raise ValueError(
                f"micro_batches={micro_batches}, and {len(inputs)} rows of a replica cannot be cut "
                f"into so many equal "
                "parts: take a divisor of the rows, or bring each replica a multiple of "
                "micro_batches."
            )
        embed, norm = gpt.ends(model)
        embed = embed.bind({"params": params["embed"]})
        norm = norm.bind({"params": params["norm"]})
        x = embed(inputs)
        entering = x.reshape(micro_batches, -1, *x.shape[1:])
        leaving = pipeline(partial(stage, model), params["stages"], entering)
        return gpt.score(gpt.head(embed, norm, leaving.reshape(x.shape)), targets)

    return loss


def pipeline(
    stage: Callable[[Any, Array], Array], params: Any, entering: Float[Array, "M B T D"]
) -> Float[Array, "M B T D"]:
    """Sends micro-batches through stages, all of which work at once, each on another micro-batch.

    Args:
      stage: `stage(params, x)`, the output of one stage, of the shape and dtype of x.
      params: those of all stages, S of them along dim 0 of each leaf.
      entering: the M micro-batches that enter the first stage.

    Returns:
      The outputs of the last stage.
    """
    stages = jax.tree.leaves(params)[0].shape[0]
    inside = [(0, 0)] * (entering.ndim - 1)  # the dims of a micro-batch
    # The inputs from outside, for each tick and stage: micro-batches for the first stage, zeros for
    # all others. Outputs from zeros, in the bubble, are never read.
    outside = jnp.pad(entering[:, None], [(0, stages - 1), (0, stages - 1), *inside])

    def tick(activations: Array, outside: Array) -> tuple[Array, Array]:
        handed_on = jnp.pad(activations[:-1], [(1, 0), *inside])
        activations = jax.vmap(jax.checkpoint(stage, prevent_cse=False))(
            params, handed_on + outside
        )
        return activations, activations

    _, outputs = jax.lax.scan(tick, jnp.zeros_like(outside[0]), outside)
    # `[:, -1]` would go from the last device to the first, and from there to all; of `take` XLA
    # makes one sum.
    return jnp.take(outputs[stages - 1 :], stages - 1, axis=1)


def stage(model: gpt.GPT, params: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Some layers, one after the other; they lie along dim 0 of each leaf."""
    layer = gpt.layer(model, "layer")

    def through(x: Array, layer_params: Any) -> tuple[Array, None]:
        return jnp.asarray(layer.apply({"params": layer_params}, x)), None

    return jax.lax.scan(through, x, params)[0]


def bubble(stages: int, micro_batches: int) -> float:
    """The share of the ticks in which a stage has nothing to do."""
    return (stages - 1) / (micro_batches + stages - 1)


def in_stages(params: Any, stages: int) -> dict[str, Any]:
    """Stacks the layers of a GPT.

    Args:
      params: from `gpt.init`.
      stages: a divisor of the number of layers, and of that of tokens in the vocabulary.

    Returns:
      The same numbers: under "stages" those of all layers, with dims (stages, layers of one stage)
      before each leaf's own; "embed" and "norm" as they are.

    Raises:
      ValueError: layers or tokens cannot be dealt out equally.
    """
    layers = [params[f"layer_{i}"] for i in range(len(params.keys() - PLACES))]
    tokens = params["embed"]["embedding"].shape[0]
    for count, what in ((len(layers), "layers"), (tokens, "tokens of the vocabulary")):
        if stages < 1 or count % stages:
            raise ValueError(
                f"stages={stages}, and {count} {what} cannot be dealt out equally to so many: take "
                f"a divisor of "
                f"{count}, or another number of {what}."
            )
    stacked = jax.tree.map(lambda *x: jnp.stack(x).reshape(stages, -1, *x[0].shape), *layers)
    return {"stages": stacked, "embed": params["embed"], "norm": params["norm"]}


def placed(params: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Puts on each device its stage and its part of the embedding's table; the last norm lies whole
    everywhere."""
    return {
        name: jax.device_put(part, NamedSharding(mesh, PLACES[name]))
        for name, part in params.items()
    }


if __name__ == "__main__":
    tyro.cli(main)
