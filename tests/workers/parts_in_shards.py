"""Two processes of two devices share a state, with leaves in parts on their devices:
`parts_in_shards.py`.

Prints the final parameters of each and the contents of its devices.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fddp

START = {
    "first": np.arange(24).reshape(3, 8) / 24,
    "second": np.arange(8.0) / 8,
    "bias": np.ones(3),
}
WHERE = {
    "first": PartitionSpec(None, "part"),
    "second": PartitionSpec("part"),
    "bias": PartitionSpec(),
}
ROWS = np.arange(24).reshape(8, 3) / 24


def loss(params: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh((x + params["bias"]) @ params["first"]) @ params["second"]) ** 2)


def main() -> None:
    fddp.init("gloo")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "part"))
    group = fddp.mesh_group(mesh)

    def placed(name: str, x: np.ndarray) -> jax.Array:
        x = np.asarray(x, np.float32)
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, WHERE[name]), lambda part: x[part]
        )

    step = fddp.train_step(loss, optax.adam(0.1), group=group, shard="state")
    state = step.init({name: placed(name, x) for name, x in START.items()})
    for _ in range(2):
        state, _ = step(state, ROWS[4 * group.rank : 4 * group.rank + 4].astype(np.float32))
    copied = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    params = jax.tree.map(lambda x: np.asarray(copied(x)).tolist(), fddp.whole(state.params))
    print(json.dumps(params))
    print({name: x.parts.addressable_shards[0].data.size for name, x in state.params.items()})


if __name__ == "__main__":
    main()
