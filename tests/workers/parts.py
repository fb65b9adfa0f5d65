"""Two processes of two devices train a model in two parts: `parts.py`.

Prints the results and the memory of each, its subgroups, and the refused calls.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from on_ranks.claims import error_of

import fddp


def loss(params: Any, x: Any) -> jax.Array:
    return jnp.mean(((x @ params["first"]) @ params["second"] + params["bias"]) ** 2)


def main() -> None:
    fddp.init("gloo")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "part"))
    group = fddp.mesh_group(mesh)

    def placed(value: float, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
        # Another value on each process, which only rank 0's may survive.
        array = np.full(shape, value if group.rank == 0 else np.nan, np.float32)
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, PartitionSpec(*axes)), lambda part: array[part]
        )

    params = {
        "first": placed(0.5, (2, 4), None, "part"),
        "second": placed(0.25, (4, 2), "part"),
        "bias": np.ones(2, np.float32),
    }
    step = fddp.train_step(loss, optax.sgd(0.125), group=group)
    state = step.init(params)
    rows = np.full((4, 2), group.rank + 1.0, np.float32)
    state, _ = step(state, rows)
    state, info = step(state, rows)
    copies = {
        name: [np.asarray(part.data) for part in x.addressable_shards]
        for name, x in state.params.items()
    }
    assert all(np.ptp(shards) == 0 for shards in copies.values()), "by symmetry"
    results = [float(shards[0].flat[0]) for shards in copies.values()]
    print(results, float(info.loss), {name: shards[0].shape for name, shards in copies.items()})

    spread = Mesh(np.array(jax.devices()).reshape(1, 4), ("replica", "part"))
    print(error_of(lambda: fddp.mesh_group(spread)))
    print("alone", group.subgroup([group.rank]).size, "backwards", group.subgroup([1, 0]).rank)
    misplaced = {**params, "first": placed(0.5, (2, 4), None, "part" if group.rank else None)}
    print("parts of first" in error_of(lambda: step.init(misplaced)))


if __name__ == "__main__":
    main()
