"""Restores pending gradients into a state without any, and on another number of replicas."""

from ast import literal_eval
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import is_shard
from fddp.checkpoints.files import Listed
from fddp.checkpoints.state_forms import part_of_state
from fddp.checkpoints.stored_arrays import Index, Read
from fddp.comm import Group
from fddp.losses import Pending, Sums
from fddp.step import TrainState
from fddp.wording import leaf_name


def metrics_literal(state: TrainState) -> str | None:
    """The structure of pending metrics as a Python literal; None without one, as for a class."""
    metrics = state.accumulated.sums.aux if state.accumulated else None
    literal = repr(jax.tree.map(lambda _: 0, metrics))
    try:
        is_literal = jax.tree.structure(literal_eval(literal)) == jax.tree.structure(metrics)
    except (ValueError, SyntaxError):
        return None
    return literal if is_literal else None


def with_pending(group: Group, listed: Listed, like: TrainState) -> TrainState:
    """Adds the forms of a checkpoint's pending gradients to a state without any, if possible."""
    forms = {
        name: form for name, form in listed.forms.items() if part_of_state(name) == "accumulated"
    }
    literal = listed.values.get("metrics")
    if not forms or like.accumulated is not None or literal is None or group.placement.other_axes:
        return like
    leaf: Any = 0
    grads = (leaf,) * sum(name.startswith("accumulated/sums/grads/") for name in forms)
    used = leaf if "accumulated/sums/used" in forms else None
    buffers = jax.tree.map(lambda _: leaf, like.model_state, is_leaf=is_shard)
    pending = Pending(Sums(grads, leaf, leaf, literal_eval(literal), used), buffers, leaf, leaf)

    def form(path: jax.tree_util.KeyPath, _: object) -> jax.ShapeDtypeStruct:
        # A leaf missing from the checkpoint is refused later, by its name.
        dtype, dims = forms.get(f"accumulated/{leaf_name(path)}", ("float32", [0]))
        return jax.ShapeDtypeStruct(
            (group.placement.replicas_in_array, *dims[1:]), jnp.dtype(dtype)
        )

    return like._replace(accumulated=jax.tree_util.tree_map_with_path(form, pending))


def of_other_replicas(group: Group, listed: Listed, name: str, read: Read) -> Read:
    """Makes a `Read` of sums pending on other replicas: each new replica adds some, or none."""
    saved_replicas = listed.values["replicas"]
    if part_of_state(name) != "accumulated" or saved_replicas == group.size:
        return read

    def row(dims: tuple[int, ...], saved: int) -> np.ndarray:
        return read(
            name,
            (saved_replicas, *dims[1:]),
            (slice(saved, saved + 1), *map(slice, (0,) * len(dims[1:]), dims[1:])),
        )

    def of_replica(dims: tuple[int, ...], replica: int) -> np.ndarray:
        # Buffers and counts are not added. The unit of the sums is equal on all replicas.
        if not name.startswith("accumulated/sums/"):
            return row(dims, replica % saved_replicas)
        rows = (row(dims, saved) for saved in range(replica, saved_replicas, group.size))
        return sum(rows, np.zeros((1, *dims[1:]), jnp.dtype(listed.forms[name][0])))

    def rows(_: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        replicas = range(place[0].start, place[0].stop)
        return np.concatenate([of_replica(dims, replica) for replica in replicas])[
            (slice(None), *place[1:])
        ]

    return rows
