"""The update of whole arrays, run on parts: what an optimizer does is not told anew for shards.

The very function that updates whole arrays is traced. Where its program goes element by element it is run on parts;
what it sums over elements is summed over replicas; and what it needs whole goes home for that.

Source: ZeRO (Rajbhandari et al., SC 2020), whose optimizers are on the user's honour.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import depth_of, is_shard, there, whole_forms
from fddp.comm import Communicator
from fddp.jaxpr import Follows, Kind, Ranks, Same, Stay, on_parts, spread, stays
from fddp.optim import kinds_of_state
from fddp.sharding.homes import at_home, dealt
from fddp.step.replica import Replica
from fddp.step.state import Mean, StepInfo, TrainState

# (state, mean) -> (next state, what the step tells), of whole arrays
Update = Callable[[TrainState, Mean], tuple[TrainState, StepInfo]]


def run_on_parts(
    replica: Replica, update: Update, state: TrainState, mine: TrainState, mean: Mean, comm: Communicator
) -> tuple[TrainState, StepInfo]:
    """Runs an update on what one replica has.

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
    run = _run_on_whole_leaves if comm.size == 1 else partial(_run_on_parts, replica, comm)
    new, info = run(update, state, mine, mean)

    def shard(old: Any, new: Any) -> Any:
        # What an optimizer has set anew is a number of any size.
        return replace(old, parts=spread(new, old.parts.shape)) if is_shard(old) else new

    held = jax.tree.map(shard, (state.params, state.opt_state), (new.params, new.opt_state), is_leaf=is_shard)
    return new._replace(params=held[0], opt_state=held[1]), info


def _run_on_parts(
    replica: Replica, comm: Communicator, update: Update, state: TrainState, mine: TrainState, mean: Mean
) -> tuple[TrainState, StepInfo]:
    """Runs the update's program where it goes element by element on parts, and else with the other replicas."""
    forms = jax.tree.map(_form, whole_forms(state))
    params, treedef = jax.tree.flatten(forms.params)
    chosen = set(replica.chosen(forms.params))
    of_params = treedef.unflatten([Follows(i) if i in chosen else _same(x) for i, x in enumerate(params)])
    of_grads = treedef.unflatten([Follows(i) if i in chosen else None for i in range(len(params))])
    of_state = kinds_of_state(forms.opt_state, replica.trained(forms.params), of_grads)
    of_mean = jax.tree.map(_same, mean._replace(grads=None))._replace(grads=of_grads)
    others = jax.tree.map(_same, forms._replace(params=None, opt_state=None))
    inputs = others._replace(params=of_params, opt_state=of_state), of_mean
    form_of_mean = jax.tree.map(_form, mean._replace(grads=None))._replace(grads=replica.trained(forms.params))
    with jax.sharding.use_abstract_mesh(replica.group.placement.view):
        program, out = jax.make_jaxpr(update, return_shape=True)(forms, form_of_mean)
    given = jax.tree.leaves(inputs, is_leaf=_is_kind)
    run = on_parts(program, given, _ranks(comm, [x.shape for x in params], stays(program, given)))
    return jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves((mine, mean))))


def _run_on_whole_leaves(
    update: Update, state: TrainState, mine: TrainState, mean: Mean
) -> tuple[TrainState, StepInfo]:
    """Runs the update of one replica alone, whose parts are whole leaves in other dims: any optimizer's goes."""
    forms = whole_forms(state)
    flat = mine.params, jax.tree.map(lambda x: x.parts if is_shard(x) else x, state.opt_state, is_leaf=is_shard)
    params, opt_state = _in_form_of((forms.params, forms.opt_state), flat)
    grads = _in_form_of(forms.params, mean.grads)
    new, info = update(mine._replace(params=params, opt_state=opt_state), mean._replace(grads=grads))
    params, opt_state = _in_form_of(flat, (new.params, new.opt_state))
    return new._replace(params=params, opt_state=opt_state), info


def _in_form_of(forms: Any, tree: Any) -> Any:
    """Arrays in other shapes of as many elements; None stays."""
    return jax.tree.map(
        lambda x, form: x if x is None else x.reshape(form.shape), tree, forms, is_leaf=lambda x: x is None
    )


def _ranks(comm: Communicator, shapes: Sequence[tuple[int, ...]], stays: Mapping[int, Stay]) -> Ranks:
    """A replica's knowledge of its parts, and its way to talk to the others."""
    homes = dealt({leaf: stay.operations for leaf, stay in stays.items()}, comm.size)

    def depth(leaf: int, size: int) -> int:
        return depth_of(size, shapes[leaf], comm.size)

    def exists(leaf: int, size: int) -> Array:
        return there(size, comm.size, comm.replica_index(), depth(leaf, size))

    return Ranks(exists, partial(_put_together, comm), partial(at_home, comm, homes, depth))


def _put_together(comm: Communicator, op: str, numbers: Sequence[Array]) -> list[Array]:
    """Numbers of all replicas, put together in their order: the same bits on all."""
    reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op]
    found = list[Array](numbers)
    for dtype in dict.fromkeys(x.dtype for x in numbers):
        places = [k for k, x in enumerate(numbers) if x.dtype == dtype]
        mine = jnp.stack([numbers[k].reshape(()) for k in places])
        sent = mine.astype(jnp.uint8) if jnp.issubdtype(dtype, jnp.bool_) else mine
        made = reduce(comm.all_gather(sent), axis=0).astype(dtype)
        for k, x in zip(places, made):
            found[k] = x.reshape(numbers[k].shape)
    return found


def _form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _same(x: Any) -> Same:
    return Same(x.size == 1)


def _is_kind(x: Any) -> bool:
    return isinstance(x, Kind)
