"""The update of whole arrays, run on parts: what an optimizer does is not told anew for shards.

The very function that updates whole arrays is traced. Where its program goes element by element it is run on parts;
what it sums over elements is summed over replicas; and what it needs whole is gathered.

Source: ZeRO (Rajbhandari et al., SC 2020), whose optimizers are on the user's honour.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import is_shard, of_rows, own_part, there, whole_forms
from fddp.comm import Communicator
from fddp.jaxpr import Follows, Kind, Ranks, Same, on_parts
from fddp.optim import kinds_of_state
from fddp.step.replica import Replica
from fddp.step.state import Mean, StepInfo, TrainState

# (state, mean) -> (next state, what the step tells), of whole arrays
Update = Callable[[TrainState, Mean], tuple[TrainState, StepInfo]]


def run_on_parts(
    replica: Replica, update: Update, state: TrainState, mine: TrainState, mean: Mean, comm: Communicator
) -> tuple[TrainState, StepInfo]:
    """Runs an update on what one replica has: element by element on parts, and else with the other replicas.

    Args:
      replica: what one replica does.
      update: of whole arrays.
      state: in shards, which say what the whole arrays are.
      mine: the same, with this replica's parts of the parameters in place of shards and of whole leaves.
      mean: what the replicas have in common; of gradients this replica's parts.
      comm: to the others.

    Returns:
      The next state, in shards where this one is; and what the step tells.
    """
    forms = jax.tree.map(_form, whole_forms(state))
    params, treedef = jax.tree.flatten(forms.params)
    chosen = set(replica.chosen(forms.params))
    of_params = treedef.unflatten([Follows(i) if i in chosen else Same() for i in range(len(params))])
    of_grads = treedef.unflatten([Follows(i) if i in chosen else None for i in range(len(params))])
    of_state = kinds_of_state(forms.opt_state, replica.trained(forms.params), of_grads)

    def kinds(state: TrainState) -> TrainState:
        others = jax.tree.map(_same, state._replace(params=None, opt_state=None))
        return others._replace(params=of_params, opt_state=of_state)

    of_mean = jax.tree.map(_same, mean._replace(grads=None))._replace(grads=of_grads)
    form_of_mean = jax.tree.map(_form, mean._replace(grads=None))._replace(grads=replica.trained(forms.params))
    with jax.sharding.use_abstract_mesh(replica.group.placement.view):
        program, (new, info) = jax.make_jaxpr(update, return_shape=True)(forms, form_of_mean)
    given = jax.tree.leaves((kinds(forms), of_mean), is_leaf=_is_kind)
    wanted = jax.tree.leaves((kinds(new), jax.tree.map(_same, info)), is_leaf=_is_kind)
    arguments = jax.tree.leaves((mine, mean))
    if comm.size == 1:  # its parts are whole leaves, laid flat
        given = [Same()] * len(given)
        arguments = [x.reshape(form.shape) for x, form in zip(arguments, program.in_avals)]
    made = on_parts(program, given, wanted, _ranks(comm))(*arguments)
    new, info = jax.tree.unflatten(jax.tree.structure((new, info)), made)

    def shard(old: Any, new: Any) -> Any:
        return replace(old, parts=new) if is_shard(old) else new

    held = jax.tree.map(shard, (state.params, state.opt_state), (new.params, new.opt_state), is_leaf=is_shard)
    return new._replace(params=held[0], opt_state=held[1]), info


def _ranks(comm: Communicator) -> Ranks:
    """A replica's knowledge of its parts, and its way to talk to the others."""

    def exists(size: int) -> Array:
        return there(size, comm.size, comm.replica_index())

    def own(x: Array) -> Array:
        return own_part(x, comm.size, comm.replica_index())

    return Ranks(exists, own, partial(_put_together, comm), partial(_gathered, comm))


def _put_together(comm: Communicator, op: str, numbers: Sequence[Array]) -> list[Array]:
    """Numbers of all replicas, put together in their order: the same bits on all."""
    reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op]
    found = list[Array](numbers)
    for dtype in dict.fromkeys(x.dtype for x in numbers):
        places = [k for k, x in enumerate(numbers) if x.dtype == dtype]
        mine = jnp.stack([numbers[k].reshape(()) for k in places])
        made = reduce(_of_all(comm, mine), axis=0).astype(dtype)
        for k, x in zip(places, made):
            found[k] = x.reshape(numbers[k].shape)
    return found


def _gathered(comm: Communicator, part: Array, shape: tuple[int, ...]) -> Array:
    """The whole array of which each replica has a part; what has no elements does not travel."""
    rows = _of_all(comm, part) if part.size else part
    return of_rows(rows, shape).astype(part.dtype)


def _of_all(comm: Communicator, mine: Array) -> Array:
    """What each replica has, a row each; truth values travel in bytes."""
    return comm.all_gather(mine.astype(jnp.uint8) if jnp.issubdtype(mine.dtype, jnp.bool_) else mine)


def _form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _same(x: Any) -> Same:
    return Same()


def _is_kind(x: Any) -> bool:
    return isinstance(x, Kind)
