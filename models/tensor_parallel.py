"""Trains the GPT on a mesh of two axes: replicas along one, the parts of each replica along the
other.

python models/tensor_parallel.py                           four replicas of two devices

python models/tensor_parallel.py --replicas 2 --parts 2    four devices

Model and loss are those of one device. The parameters are placed as in Megatron-LM: the first
matrices of attention and feed-forward by columns, the last ones by rows, so that every device has
whole heads and hidden units of its own. XLA puts in the sums over the parts; fddp sums gradients
over the replicas, of which each device sends the parts that it holds. On a machine without
accelerators the devices are virtual CPUs.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fddp

sys.path.append(
    str(Path(__file__).parents[1])
)  # where models is, with fddp installed and run from anywhere
from models import data, gpt

COLUMNS = PartitionSpec(None, "part")
ROWS = PartitionSpec("part", None)
PLACES = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), COLUMNS),
    **dict.fromkeys(("out", "down", "embed"), ROWS),
}


def main(
    replicas: int = 4, parts: int = 2, steps: int = 60, seed: int = 0, quick: bool = False
) -> None:
    """Trains the tiny GPT on Python's own sources.

    Args:
      replicas: how often there is the whole model.
      parts: over how many devices each replica is spread; a divisor of its 2 key-value heads.
      steps: updates of the parameters.
      seed: decides the first parameters and the order of rows.
      quick: twenty steps, as the tests run it.
    """
    steps = 20 if quick else steps
    jax.config.update("jax_num_cpu_devices", replicas * parts)
    mesh = two_axes(replicas, parts)
    group = fddp.mesh_group(mesh)
    model = gpt.PRESETS["tiny"]
    step = fddp.train_step(gpt.loss_fn(model), optax.adamw(1e-2), group=group, has_aux=True)
    params, _ = gpt.init(model, jax.random.key(seed), gpt.batch(model, 1))
    state = step.init(placed(params, mesh))

    rows, _ = data.read_text(None, model.context)
    random = np.random.default_rng(seed)
    losses: list[float] = []
    for _ in range(steps):
        tokens = rows[random.integers(len(rows), size=16 * group.size)].astype(np.int32)
        state, info = step(state, {"tokens": tokens})
        losses.append(float(info.loss))
    total_mib, local_mib = size_mib(state.params)
    print(f"{group.size} replicas × {parts} devices")
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {steps} steps")
    print(f"parameters {total_mib:.3f} MiB, of which each device holds {local_mib:.3f} MiB")
    print(step.plan)


def two_axes(replicas: int, parts: int, name: str = "part") -> Mesh:
    """The first devices as a mesh; those of one replica are neighbours, along the second axis, of
    this name."""
    devices = np.array(jax.devices()[: replicas * parts]).reshape(replicas, parts)
    return Mesh(devices, ("replica", name), axis_types=(AxisType.Auto, AxisType.Auto))


def placed(params: Any, mesh: Mesh) -> Any:
    """Cuts the matrices of every layer, and the embedding's table by tokens; all other leaves are
    replicated."""

    def place(path: Any, x: jax.Array) -> jax.Array:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        spec = next((PLACES[name] for name in names if name in PLACES), PartitionSpec())
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, params)


def size_mib(params: Any) -> tuple[float, float]:
    """MiB of the parameters, and of one device's parts of them."""
    leaves = jax.tree.leaves(params)
    total_bytes = sum(x.nbytes for x in leaves)
    local_bytes = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    return total_bytes / 2**20, local_bytes / 2**20


if __name__ == "__main__":
    tyro.cli(main)
