"""Names and forms of the leaves of a state, and their comparison with those of a checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import Shard, is_shard, stack_shape
from fddp.checkpoints.files import Listed
from fddp.comm import REPLICATED, Group, shortened
from fddp.jax_internals import resharded
from fddp.step import TrainState
from fddp.wording import leaf_name

PER_REPLICA = ("hook_state", "accumulated")
"""The fields of a state whose rows along a first dim belong to the replicas."""


def by_path(state: TrainState) -> dict[str, Any]:
    """Path → leaf of a state of arrays or forms, in order; a shard is a leaf."""
    leaves = dict[str, Any]()
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_shard):
        name = leaf_name(path)
        if name in leaves:
            raise ValueError(
                f"two leaves of the state are called {name!r}, and only one would be saved: rename "
                "a key."
            )
        if not hasattr(x, "dtype") and not is_shard(x):  # a user's number
            x = np.asarray(x, jnp.result_type(x))
        leaves[name] = x
    return leaves


def check_fits(group: Group, number: int, listed: Listed, leaves: Mapping[str, Any]) -> set[str]:
    """Refuses a checkpoint whose leaves differ from those of the state to restore.

    Returns the names of leaves to leave as they are: the hooks' memory, on another number of
    replicas.
    """
    saved_replicas = listed.values["replicas"]
    retained = {
        name
        for name in leaves
        if part_of_state(name) == "hook_state" and saved_replicas != group.size
    }
    # Dicts, for lookups: searches in lists of thousands of leaves would take seconds.
    forms = {name: form(group, name, x) for name, x in leaves.items()}
    required = {_described(group, *item): None for item in forms.items() if item[0] not in retained}
    saved = {
        _described(group, *item): None for item in listed.forms.items() if item[0] not in retained
    }
    extra = [x for x in saved if x not in required]
    missing = [x for x in required if x not in saved]
    if not extra and not missing:
        return retained
    advice = ""
    if _has_pending(listed.forms) and not _has_pending(leaves):
        advice = "; its gradients were pending: give a state that step.no_sync returned"
    if saved_replicas != group.size and any(is_shard(x) and x.copies for x in leaves.values()):
        advice += (
            f"; fddp.local_steps continues only on the same number of replicas, {saved_replicas}"
        )
    raise ValueError(
        f"the checkpoint of step {number} is of another training: it has "
        f"{shortened(extra) or 'nothing else'}, and lacks {shortened(missing) or 'nothing'}"
        f"{advice}."
    )


def form(group: Group, name: str, x: Any) -> tuple[str, list[int]]:
    """Dtype and dims of a stored leaf: of the whole array, or of all replicas' copies or rows."""
    stored_form = word_form(x)
    if is_shard(x):
        return str(stored_form.parts.dtype), list(stack_shape(stored_form, group.size))
    dims = list(stored_form.shape)
    if is_row_of_rank(group, name):
        dims = [group.size, *dims[1:]]
    return str(stored_form.dtype), dims


def part_of_state(name: str) -> str:
    """The field of the state that holds a leaf of this name."""
    return name.split("/")[0]


def is_row_of_rank(group: Group, name: str) -> bool:
    """True if each rank has a separate array of its replica, as groups without a mesh have."""
    return not group.placement.on_mesh and part_of_state(name) in PER_REPLICA


def words(x: Any) -> Any:
    """Converts random keys to their words, with one more dim; other arrays are unchanged."""
    if is_shard(x) and is_key(x.parts):
        # The words lie on the replica of their keys.
        return _shard_of_words(x, jax.jit(_flat_words, out_shardings=x.parts.sharding)(x.parts))
    if not is_shard(x) and is_key(x):
        return jax.random.key_data(x)
    return x


def word_form(x: Any) -> Any:
    """The form of `words(x)`, for an array or a form."""
    if is_shard(x) and is_key(x.parts):
        return _shard_of_words(x, jax.eval_shape(_flat_words, x.parts))
    if not is_shard(x) and is_key(x):
        return jax.eval_shape(jax.random.key_data, x)
    return x


def _flat_words(keys: jax.Array) -> jax.Array:
    return jax.random.key_data(resharded(keys, REPLICATED)).reshape(-1)


def _shard_of_words(keys: Shard, flat: jax.Array | jax.ShapeDtypeStruct) -> Shard:
    shape = (*keys.shape, flat.size // max(1, keys.parts.size))
    return replace(keys, parts=flat, layout=replace(keys.layout, shape=shape))


def of_flat_words(flat: jax.Array, like: Any) -> jax.Array:
    """Converts words back to random keys if `like` holds keys; else returns the array unchanged."""
    if not is_key(like):
        return flat
    impl = key_impl(like)

    def keys(flat: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(
            resharded(flat, REPLICATED).reshape(*like.shape, -1), impl=impl
        )

    return jax.jit(keys, out_shardings=flat.sharding)(flat)


def key_impl(x: Any) -> Any:
    """The implementation of a random key, or of the form of a key."""
    impls = list[Any]()
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), x)
    return impls[0]


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _has_pending(names: Iterable[str]) -> bool:
    return "accumulated" in map(part_of_state, names)


def _described(group: Group, name: str, form: tuple[str, Sequence[int]]) -> str:
    dtype, shape = form
    if part_of_state(name) == "accumulated":  # pending sums fit any number of replicas
        shape = [group.size, *shape[1:]]
    return f"{name} {dtype}{list(shape)}"
