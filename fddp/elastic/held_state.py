"""The state of a training as host arrays, which outlive the devices of a view."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import is_shard
from fddp.checkpoints.archives import Index, Portion
from fddp.checkpoints.files import Form, Listed
from fddp.checkpoints.saved_leaves import field_of, is_key, named_leaves, stored_form
from fddp.checkpoints.stored_pieces import local_portion, read_state
from fddp.comm import Group
from fddp.elastic.views import View
from fddp.jax_internals import rows_here
from fddp.step import TrainState

IN_GROUP = ("hook_state", "accumulated")
"""The fields of a state that end with a group."""


class HeldState(NamedTuple):
    """A member's own state, or the copy of another member's parts, after some steps."""

    version: tuple[int, int]
    """Steps done, and the epoch of the view that did the last one."""
    owners: tuple[str, ...]
    """The members whose parts make up the state; empty if each has all of it."""
    forms: Mapping[str, Form]
    """Name of a leaf → its form; empty for a copy, as `leaves` are."""
    leaves: Mapping[str, np.ndarray]
    """Name of a leaf that each member has → its values."""
    portions: Mapping[str, Portion]
    """Name of another leaf → this member's ranges of it, and their values."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        pieces = [x for portion in self.portions.values() for _, x in portion.pieces]
        return sum(x.nbytes for x in [*self.leaves.values(), *pieces])


Store = dict[tuple[str, tuple[int, int]], HeldState]
"""uid of a member, version of the state → its part."""


class StateLost(RuntimeError):
    """A lost member's part of the state is nowhere else."""


def has_parts(state: TrainState) -> bool:
    """True if members hold different parts of a state."""
    return any(is_shard(x) for x in jax.tree.leaves(state, is_leaf=is_shard))


def to_host(group: Group, view: View, number: int, state: TrainState) -> HeldState:
    """Copies this member's part of a state to the host; sends nothing.

    The hooks' memory is left out: it starts again in each group.
    """
    named = named_leaves(state, IN_GROUP)
    leaves = {name: leaf for name, leaf in named.items() if field_of(name) not in IN_GROUP}
    forms = {name: stored_form(group, leaf) for name, leaf in leaves.items()}
    arrays = dict[str, np.ndarray]()
    portions = dict[str, Portion]()
    for name, leaf in leaves.items():
        if leaf.rows:
            portions[name] = local_portion(group, name, leaf)
        else:
            words = jax.random.key_data(leaf.x) if is_key(leaf.x) else leaf.x
            arrays[name] = np.array(rows_here(words))
    owners = tuple(member.uid for member in view.members) if portions else ()
    return HeldState((number, view.epoch), owners, forms, arrays, portions)


def newest_state(group: Group, store: Store) -> HeldState | None:
    """Returns the newest state that the members have all parts of; every member calls it.

    None at the start of a job. The state is whole on each member.

    Raises:
      StateLost: a part of every state is lost; on every member.
    """
    local_list = [(*key, x.owners, bool(x.forms)) for key, x in store.items()]
    # version → uid → the first rank with that part; the members with parts of it; the first rank
    # with the leaves that are whole
    providers: dict[tuple[int, int], dict[str, int]] = {}
    owners: dict[tuple[int, int], Sequence[str]] = {}
    roots: dict[tuple[int, int], int] = {}
    for rank, rank_list in enumerate(group.all_gather_object(local_list)):
        for uid, version, part_owners, is_own in rank_list:
            providers.setdefault(version, {}).setdefault(uid, rank)
            owners[version] = part_owners
            if is_own:
                roots.setdefault(version, rank)
    if not providers:
        return None
    complete = [x for x in roots if providers[x].keys() >= {*owners[x]}]
    if not complete:
        raise StateLost(
            "a rank and the one after it, which held a copy of its part of the state, were lost "
            "at once: start the job again from its newest checkpoint."
        )
    version = max(complete)
    local = next((x for x in store.values() if x.version == version and x.forms), None)
    root = roots[version]
    described = local._replace(leaves=dict.fromkeys(local.leaves), portions={}) if local else None
    description: Any = group.broadcast_object(described, root)
    incomplete = bool(group.all_reduce(np.int32(local is None), "max"))
    leaves = dict[str, np.ndarray]()
    for name, (dtype, dims, _) in description.forms.items():
        if name not in description.leaves:
            uids = [uid for uid, rank in providers[version].items() if rank == group.rank]
            portions = [store[uid, version].portions[name] for uid in uids]
            gathered = chain.from_iterable(group.all_gather_object(portions))
            leaves[name] = _joined(list(gathered), dtype)
        elif incomplete:
            values = local.leaves[name] if local else np.zeros(dims, jnp.dtype(dtype))
            leaves[name] = group.broadcast(values, root)
        elif local:
            leaves[name] = local.leaves[name]
    return description._replace(leaves=leaves)


def _joined(portions: Sequence[Portion], dtype: str) -> np.ndarray:
    """Joins the parts of all members to the whole array."""
    joined = np.zeros(portions[0].dims, jnp.dtype(dtype))
    for portion in portions:
        for place, piece in portion.pieces:
            joined[place] = piece
    return joined


def to_devices(group: Group, held_state: HeldState, like: TrainState) -> TrainState:
    """Puts a state on the group's devices, with the hooks' memory of `like`."""

    def read(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        return held_state.leaves[name].reshape(dims)[place]

    listed = Listed({"step": held_state.version[0], "replicas": -1}, held_state.forms, {})
    return read_state(group, listed, read, like, IN_GROUP)
