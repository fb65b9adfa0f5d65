"""The leaves of a state by their names, and their forms: what a checkpoint must have to be one of this training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import Shard, is_shard, stacked
from fddp.checkpoints.files import Listed
from fddp.comm import REPLICATED, Group, shortened
from fddp.jax_internals import resharded
from fddp.step import TrainState
from fddp.wording import leaf_name

OWN = ("hook_state", "accumulated")
"""The parts of a state that each replica has for itself, along a first dim."""


def named(state: TrainState) -> dict[str, Any]:
    """Names the leaves of a state by their paths.

    Args:
      state: arrays, or their forms.

    Returns:
      The leaves in their order; a shard is one.

    Raises:
      ValueError: two leaves have one name, and only one would be saved.
    """
    found = dict[str, Any]()
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_shard):
        name = leaf_name(path)
        if name in found:
            raise ValueError(f"two leaves of the state are called {name!r}, and only one would be saved: rename a key.")
        found[name] = x if hasattr(x, "dtype") or is_shard(x) else np.asarray(x, jnp.result_type(x))  # a user's number
    return found


def check_fits(group: Group, number: int, listed: Listed, leaves: Mapping[str, Any]) -> set[str]:
    """Refuses the checkpoint of another training.

    Args:
      group: the replicas.
      number: of the checkpoint.
      listed: its list.
      leaves: of the state that is wanted, by their names.

    Returns:
      The names of leaves that the checkpoint has no use for: what hooks of other replicas remembered.

    Raises:
      ValueError: it is of another model, optimizer or hook, or has gradients pending, for which there is no form.
    """
    before = listed.told["replicas"]
    forgotten = {name for name in leaves if part_of_state(name) == "hook_state" and before != group.size}
    # Keys of dicts: a search in a list of thousands of leaves takes seconds.
    forms = {name: form(group, name, x) for name, x in leaves.items()}
    wanted = {_described(group, *item): None for item in forms.items() if item[0] not in forgotten}
    got = {_described(group, *item): None for item in listed.forms.items() if item[0] not in forgotten}
    more = [x for x in got if x not in wanted]
    less = [x for x in wanted if x not in got]
    if not more and not less:
        return forgotten
    pending, expected = (any(part_of_state(name) == "accumulated" for name in some) for some in (listed.forms, leaves))
    advice = "; its gradients were pending: give a state that step.no_sync returned" if pending > expected else ""
    if before != group.size and any(is_shard(x) and x.copies for x in leaves.values()):
        advice += f"; replicas that train alone (fddp.local_steps) go on where there are as many, {before}"
    raise ValueError(
        f"the checkpoint of step {number} is of another training: it has {shortened(more) or 'nothing else'}, and "
        f"lacks {shortened(less) or 'nothing'}{advice}."
    )


def form(group: Group, name: str, x: Any) -> tuple[str, list[int]]:
    """Finds the dtype and the dims of a whole leaf; of copies and rows that replicas have, of all of them.

    Args:
      group: the replicas.
      name: of the leaf.
      x: an array, a shard, or a form; a random key counts as its words.

    Returns:
      Both, as a list of files holds them.
    """
    of_words = word_form(x)
    if is_shard(x):
        return str(of_words.parts.dtype), list(stacked(of_words, group.size).shape)
    dims = [group.size, *of_words.shape[1:]] if is_row(group, name) else list(of_words.shape)
    return str(of_words.dtype), dims


def part_of_state(name: str) -> str:
    """The field of a state in which a leaf of this name lies."""
    return name.split("/")[0]


def is_row(group: Group, name: str) -> bool:
    """Whether each rank has an array of its own there, of its replica: without a mesh no array is of all."""
    return not group.placement.on_mesh and part_of_state(name) in OWN


def words(x: Any) -> Any:
    """Puts its words in the place of a random key, and of each key of a shard: one more dim."""
    if not is_shard(x):
        return jax.random.key_data(x) if is_key(x) else x
    if not is_key(x.parts):
        return x
    # The words of each replica's keys lie where the keys do.
    return _shard_of_words(x, jax.jit(_flat_words, out_shardings=x.parts.sharding)(x.parts))


def word_form(x: Any) -> Any:
    """The form of `words(x)`, of an array or a form."""
    if is_shard(x):
        return _shard_of_words(x, jax.eval_shape(_flat_words, x.parts)) if is_key(x.parts) else x
    return jax.eval_shape(jax.random.key_data, x) if is_key(x) else x


def _flat_words(keys: Any) -> Any:
    return jax.random.key_data(resharded(keys, REPLICATED)).reshape(-1)


def _shard_of_words(keys: Shard, flat: Any) -> Shard:
    return replace(keys, parts=flat, shape=(*keys.shape, flat.size // max(1, keys.parts.size)))


def of_flat_words(flat: jax.Array, like: Any) -> jax.Array:
    """Puts random keys in the place of their words, where `like` is some; else gives the array as it is."""
    if not is_key(like):
        return flat
    impl = key_impl(like)

    def keys(flat: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(resharded(flat, REPLICATED).reshape(*like.shape, -1), impl=impl)

    return jax.jit(keys, out_shardings=flat.sharding)(flat)


def key_impl(x: Any) -> Any:
    """Finds the kind of a random key, or of the form of one."""
    found = list[Any]()
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), x)
    return found[0]


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _described(group: Group, name: str, form: tuple[str, Sequence[int]]) -> str:
    dtype, shape = form
    if part_of_state(name) == "accumulated":  # sums fit any number of replicas
        shape = [group.size, *shape[1:]]
    return f"{name} {dtype}{list(shape)}"
