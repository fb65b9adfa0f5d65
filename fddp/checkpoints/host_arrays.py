"""A state as arrays of one process, and back: from replicas over any backend, to as many or to others."""

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fddp.buckets import is_shard, stacked
from fddp.checkpoints.files import Leaves, Saved
from fddp.comm import REPLICATED, Group, shortened
from fddp.sharding import cut
from fddp.sharding import whole as put_together
from fddp.step import TrainState
from fddp.wording import leaf_name

OWN = ("hook_state", "accumulated")
"""The parts of a state that each replica has for itself, along a first dim."""


def whole(group: Group, state: TrainState) -> Leaves:
    """All of a state in arrays of rank 0, in memory of their own.

    Args:
      group: the replicas; every rank calls it, for what is a rank's own is sent.
      state: of a step over them.

    Returns:
      Arrays by their paths; the words of random keys. Nothing on the other ranks.
    """
    leaves = dict[str, np.ndarray]()
    for name, x in _named(state).items():
        x = _words(put_together(stacked(x, group.size) if is_shard(x) else x, group=group))
        if _apart(group, name):
            x = np.concatenate(group.all_gather(x))
        elif isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and not _here(x):
            x = jax.block_until_ready(_gathering(x.sharding.mesh)(x))
        if group.rank == 0:
            leaves[name] = np.array(x)
    return leaves


def handed_round(group: Group, saved: Saved | None) -> Saved | None:
    """Gives every rank the checkpoint that rank 0 has read.

    Args:
      group: the replicas.
      saved: a checkpoint on rank 0, None elsewhere, or None where there is none.

    Returns:
      The checkpoint.
    """
    forms = {name: (str(x.dtype), x.shape) for name, x in saved.leaves.items()} if saved else {}
    text = json.dumps((saved.number, saved.told, forms) if saved else None).encode()
    (size,) = group.broadcast(np.asarray([len(text)]))
    text = group.broadcast(np.frombuffer(text.ljust(size)[:size], np.uint8)).tobytes()
    if (heard := json.loads(text)) is None:
        return None
    number, told, forms = heard
    empty = {name: np.zeros(shape, jnp.dtype(dtype)) for name, (dtype, shape) in forms.items()}
    leaves = group.broadcast(saved.leaves if saved else empty)
    return Saved(number, {name: leaves[name] for name in forms}, told)


def laid(group: Group, saved: Saved, like: TrainState) -> TrainState:
    """Lays a checkpoint out as a state of this group.

    Args:
      group: the replicas.
      saved: a checkpoint of as many, or of others.
      like: the form. What hooks of other replicas remembered is taken from it.

    Returns:
      The state.

    Raises:
      ValueError: the checkpoint is of another model, optimizer or hook, or has gradients pending and `like` has not.
    """
    named = _named(like)
    before = saved.told["replicas"]
    forgotten = {name for name in named if _part(name) == "hook_state" and before != group.size}
    wanted = [f"{name} {_form(group, name, x)}" for name, x in named.items() if name not in forgotten]
    got = [f"{name} {x.dtype}{list(x.shape)}" for name, x in saved.leaves.items() if name not in forgotten]
    more = [x for x in got if x not in wanted]
    less = [x for x in wanted if x not in got]
    if more or less:
        pending = any(_part(name) == "accumulated" for name in saved.leaves) and like.accumulated is None
        advice = "; its gradients were pending: give a state that step.no_sync returned" if pending else ""
        if before != group.size and any(is_shard(x) and x.copies for x in named.values()):
            advice += f"; replicas that train alone (fddp.local_steps) go on where there are as many, {before}"
        raise ValueError(
            f"the checkpoint of step {saved.number} is of another training: it has "
            f"{shortened(more) or 'nothing else'}, and lacks {shortened(less) or 'nothing'}{advice}."
        )

    def laid(name: str, x: Any) -> Any:
        if name in forgotten:
            return x
        if is_shard(x):
            return cut(group, saved.leaves[name], x)
        mine = saved.leaves[name][group.rank :][:1] if _apart(group, name) else saved.leaves[name]
        if not isinstance(x, jax.Array):
            return mine
        array = jax.make_array_from_callback(mine.shape, _words(x).sharding, mine.__getitem__)
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(x)) if _is_key(x) else array

    tree = jax.tree.structure(like, is_leaf=is_shard)
    return tree.unflatten([laid(name, x) for name, x in named.items()])


def check_names(state: TrainState) -> None:
    """Refuses a state of which two leaves would be saved under one name.

    Args:
      state: what is to be saved.

    Raises:
      ValueError: the message says which name.
    """
    _named(state)


def _named(state: TrainState) -> dict[str, Any]:
    """The leaves by their paths, in their order."""
    named = dict[str, Any]()
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_shard):
        name = leaf_name(path)
        if name in named:
            raise ValueError(f"two leaves of the state are called {name!r}, and only one would be saved: rename a key.")
        named[name] = x
    return named


@cache
def _gathering(mesh: Any) -> Any:
    """A program for each mesh, not for each array that is saved."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, REPLICATED))


def _here(x: jax.Array) -> bool:
    return x.is_fully_addressable or x.is_fully_replicated


def _part(name: str) -> str:
    return name.split("/")[0]


def _apart(group: Group, name: str) -> bool:
    """Whether each rank has an array of its own there, of its replica: without a mesh no array is of all."""
    return not group.placement.on_mesh and _part(name) in OWN


def _form(group: Group, name: str, x: Any) -> str:
    if is_shard(x):
        return f"{x.parts.dtype}{list(stacked(x, group.size).shape)}"
    words = _words(x)
    shape = [group.size, *words.shape[1:]] if _apart(group, name) else list(words.shape)
    return f"{words.dtype}{shape}"


def _words(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
