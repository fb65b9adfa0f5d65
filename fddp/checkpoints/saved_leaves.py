"""The leaves of a state: their names, their forms in a checkpoint, and the comparison of both."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import ShardLayout, is_shard
from fddp.checkpoints.files import Form, Listed
from fddp.comm import REPLICATED, Group, add_replica_dim, drop_replica_dim, shortened
from fddp.step import TrainState
from fddp.wording import leaf_name

LOCAL = {
    "hook_state": "the memory of hooks",
    "model_state": "the buffers of each replica",
}
"""The fields of a state that replicas hold with different values. They are not restored on another
number of replicas."""


class Leaf(NamedTuple):
    """A leaf of a state."""

    x: Any
    """An array, or its form."""
    rows: bool
    """True if each replica has some rows of the array, and a process those of its replicas."""
    layout: ShardLayout | None = None
    """The layout of the array of which these rows are parts."""


def stacked_buffers(group: Group, state: TrainState, local: Sequence[str]) -> TrainState:
    """Gives buffers that are `local` a first dim over replicas, in arrays or forms."""
    if "model_state" not in local:
        return state
    run = group.placement.program(add_replica_dim, (REPLICATED,), group.placement.per_replica)
    buffers = group.placement.place(state.model_state, REPLICATED)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(buffers)):
        return state._replace(model_state=jax.eval_shape(run, buffers))
    return state._replace(model_state=run(buffers))


def unstacked_buffers(group: Group, state: TrainState, local: Sequence[str]) -> TrainState:
    """Drops the first dim again: the inverse of `stacked_buffers`."""
    if "model_state" not in local:
        return state
    run = group.placement.program(drop_replica_dim, (group.placement.per_replica,), REPLICATED)
    return state._replace(model_state=run(state.model_state))


def named_leaves(state: TrainState, local: Sequence[str]) -> dict[str, Leaf]:
    """Path → leaf of a state; the fields in `local` have a first dim over replicas."""
    leaves = dict[str, Leaf]()
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_shard):
        name = leaf_name(path)
        if name in leaves:
            raise ValueError(
                f"two leaves of the state are called {name!r}, and only one would be saved: rename "
                "a key."
            )
        if is_shard(x):
            leaves[name] = Leaf(x.parts, True, None if is_key(x.parts) else x.layout)
            continue
        if not hasattr(x, "dtype"):  # a user's number
            x = np.asarray(x, jnp.result_type(x))
        leaves[name] = Leaf(x, field_of(name) in local)
    return leaves


def field_of(name: str) -> str:
    return name.split("/")[0]


def form_of_words(x: Any) -> Any:
    """The form of an array as it is stored: of random keys, their words."""
    return jax.eval_shape(jax.random.key_data, x) if is_key(x) else x


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def stored_dims(group: Group, leaf: Leaf) -> tuple[int, ...]:
    """Dims of an array as it is stored: layers and columns, if replicas hold it in parts."""
    if leaf.layout:
        return leaf.layout.depth, leaf.layout.layer_size
    dims = form_of_words(leaf.x).shape
    if leaf.rows:
        return (dims[0] // group.placement.replicas_in_array * group.size, *dims[1:])
    return dims


def stored_form(group: Group, leaf: Leaf) -> Form:
    """Dtype, dims, and dims as it is stored, of the whole array or the rows of all replicas."""
    dims = stored_dims(group, leaf)
    shape = leaf.layout.shape if leaf.layout else dims
    return str(form_of_words(leaf.x).dtype), list(shape), list(dims)


def check_fits(
    group: Group, listed: Listed, leaves: Mapping[str, Leaf], local: Sequence[str]
) -> set[str]:
    """Refuses a checkpoint whose leaves differ from those of the state to restore.

    Returns the names of leaves that are not restored: the fields in `local`, on another number of
    replicas.
    """
    saved_replicas = listed.values["replicas"]
    skipped = local if saved_replicas != group.size else ()
    # Dicts, for lookups: searches in lists of thousands of leaves would take seconds.
    forms = {name: stored_form(group, leaf) for name, leaf in leaves.items()}
    required = _described(forms, skipped)
    saved = _described(listed.forms, skipped)
    extra = [x for x in saved if x not in required]
    missing = [x for x in required if x not in saved]
    retained = {name for name in leaves if field_of(name) in skipped}
    if not extra and not missing:
        if any(isinstance(leaves[name].x, jax.ShapeDtypeStruct) for name in retained):
            raise ValueError(
                f"the checkpoint is of {saved_replicas} replicas and these are {group.size}: "
                f"{words_of(retained)} cannot be restored, so give a state from step.init."
            )
        return retained
    advice = ""
    if saved_replicas != group.size and any(
        leaf.rows and leaf.layout is None and name not in retained for name, leaf in leaves.items()
    ):
        advice = (
            f"; fddp.local_steps continues only on the same number of replicas, {saved_replicas}"
        )
    raise ValueError(
        f"the checkpoint of step {listed.values['step']} is of another training: it has "
        f"{shortened(extra) or 'nothing else'}, and lacks {shortened(missing) or 'nothing'}"
        f"{advice}."
    )


def words_of(names: Sequence[str] | set[str]) -> str:
    """Lists the fields of local values among some names of leaves."""
    fields = set(map(field_of, names))
    return " and ".join(words for field, words in LOCAL.items() if field in fields)


def _described(forms: Mapping[str, Form], skipped: Sequence[str]) -> dict[str, None]:
    return {
        f"{name} {dtype}{list(dims)}": None
        for name, (dtype, dims, _) in forms.items()
        if field_of(name) not in skipped
    }
