"""A step of data-parallel training in plain JAX, as naive as it can be: the shortest form of
`fddp.train_step`.

The state lies whole on every replica, and each replica has an equal part of the rows. Nothing is
sent before the last gradient is there, and every leaf is sent by itself. `docs/twin.md` goes
through it and says what fddp does beyond.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB
2020), section 3.2.1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

Params = Any
Batch = Any


class State(NamedTuple):
    """The state that a step carries on."""

    params: Params
    opt_state: optax.OptState


def train_step(
    loss_fn: Callable[[Params, Batch], jax.Array],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """Returns `(state, batch) -> (state, loss)` over the replicas along a mesh's axis "replica"."""

    def mean_over_replicas(x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x, "replica")

    def on_one_replica(state: State, rows: Batch) -> tuple[State, jax.Array]:
        # 1. Gradients: each replica differentiates the mean loss of its own rows.
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, rows)

        # 2. All-reduce: one collective for each leaf gives every replica the same mean.
        gradients = jax.tree.map(mean_over_replicas, gradients)

        # 3. Update: equal states and equal gradients make equal states, so no more is sent.
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state), mean_over_replicas(loss)

    replicated = PartitionSpec()
    in_rows = PartitionSpec("replica")
    specs: Any = {"in_specs": (replicated, in_rows), "out_specs": (replicated, replicated)}
    # A checked shard_map sums the gradients of whole parameters itself, and hides the second step.
    step = jax.shard_map(on_one_replica, mesh=mesh, check_vma=False, **specs)
    return jax.jit(step)
