"""The state of a training as host arrays, which outlive the devices of a view."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fddp.checkpoints.files import Form, Index, Listed
from fddp.checkpoints.saved_leaves import field_of, is_key, named_leaves
from fddp.checkpoints.stored_pieces import read_state
from fddp.comm import Group
from fddp.jax_internals import rows_here
from fddp.step import TrainState

IN_GROUP = ("hook_state", "accumulated")
"""The fields of a state that end with a group."""


class HeldState(NamedTuple):
    """A member's state after some steps."""

    version: tuple[int, int]
    """Steps done, and the epoch of the view that did the last one."""
    leaves: Mapping[str, np.ndarray]
    """Name of a leaf → its values."""

    @property
    def forms(self) -> dict[str, Form]:
        """Name of a leaf → its form."""
        return {name: (str(x.dtype), x.shape, x.shape) for name, x in self.leaves.items()}


def to_host(epoch: int, state: TrainState) -> HeldState:
    """Copies a state to the host, without the memory of hooks, which starts again in each group."""
    named = named_leaves(state, IN_GROUP)
    leaves = {name: leaf for name, leaf in named.items() if field_of(name) not in IN_GROUP}
    words = {name: jax.random.key_data(x.x) if is_key(x.x) else x.x for name, x in leaves.items()}
    arrays = {name: np.array(rows_here(x)) for name, x in words.items()}
    return HeldState((int(state.step), epoch), arrays)


def newest_state(group: Group, local: HeldState | None) -> HeldState | None:
    """Returns the newest state of all members, or None without one; every member calls it."""
    versions = group.all_gather_object(local and local.version)
    newest = max(filter(None, versions), default=None)
    if newest is None or all(version == newest for version in versions):
        return local
    root = versions.index(newest)
    current = local if local and local.version == newest else None
    forms: dict[str, Form] = group.broadcast_object(current and current.forms, root)
    leaves = dict[str, np.ndarray]()
    for name, (dtype, dims, _) in forms.items():
        values = current.leaves[name] if current else np.zeros(dims, jnp.dtype(dtype))
        leaves[name] = group.broadcast(values, root)
    return HeldState(newest, leaves)


def to_devices(group: Group, held_state: HeldState, like: TrainState) -> TrainState:
    """Puts a state on the group's devices, with the hooks' memory of `like`."""

    def read(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        return held_state.leaves[name].reshape(dims)[place]

    listed = Listed({"step": held_state.version[0], "replicas": -1}, held_state.forms, {})
    return read_state(group, listed, read, like, IN_GROUP)
